"""The exchange of KV pages between replicas with roles (--prefill-replicas).

A replica that computes prompts for others keeps their pages in a tier in shared memory, or in the
files of --kv-cache-dir. The other replicas have it as a tier, which may lose pages at any time: on
the same machine they read it, and from other machines they ask for its pages by TCP.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import (
    REPLICA_PREFIX,
    ReplicaPlace,
    WorkerArgs,
)
from quadriga.server.models.resolve import ModelFiles
from quadriga.server.processes.child import Child
from quadriga.server.processes.page_sources import PageSources
from quadriga.server.processes.run_dir import SHARED_MEMORY, remove_left_behind
from quadriga.wire.links import NodeLinks
from worker_proc.kv_tiers.page_copies import PageCopies
from worker_proc.kv_tiers.page_server import PageServer
from worker_proc.kv_tiers.peer_pages import PeerPages
from worker_proc.kv_tiers.shared_pages import (
    SharedPages,
    SharedPeers,
    SharedReader,
    file_bytes,
    places_in,
    shared_file,
)
from worker_proc.kv_tiers.tiers import PeerFiles, PeerTier
from worker_proc.startup.devices import free_memory
from worker_proc.step.runner import Runner

GIB = 2**30
# Of the free memory with the pages of all replicas together.
EXCHANGE_SHARE = 0.5


class PageKind(NamedTuple):
    """What the pages of a replica are.

    Attributes:
        namespace: a hash of the facts.
        page_bytes: size of a page.
        facts: all that says what its bytes mean, by name.
    """

    namespace: bytes
    page_bytes: int
    facts: dict[str, Any]

    @property
    def texts(self) -> dict[str, str]:
        """The facts as texts, which replicas on other machines compare with theirs."""
        return {name: str(value) for name, value in self.facts.items()}


@dataclass(frozen=True, slots=True)
class PageExchange:
    """How a replica takes part.

    Attributes:
        directory: of the pages of the replicas of this machine, unless --kv-cache-dir names another
            one.
        exports: this replica writes the pages of prompts there, for others.
        sources: numbers of the other replicas that do.
        links: where this replica gives pages to other machines, and the keys; None: all replicas
            are on this machine.
        server_dir: directory with the file of PageSources.
    """

    directory: str
    exports: bool
    sources: tuple[int, ...]
    links: NodeLinks | None = None
    server_dir: Path = Path()

    @classmethod
    def of(cls, child: Child) -> "PageExchange | None":
        """Return the part of a replica; None where replicas have no roles."""
        args, number = child.config.replicas, child.number
        if not args.has_roles:
            return None
        sources = tuple(other for other in range(args.max_prefill_replicas) if other != number)
        links = child.endpoints.links if args.in_cluster else None
        exports = args.computes_prompts(number)
        return cls(child.pages_dir, exports, sources, links, child.server_dir)

    def peers(self, args: WorkerArgs, kind: PageKind, copies: PageCopies) -> PeerTier:
        """Return the tiers of the other replicas.

        Args:
            args: the worker's flags.
            kind: what their pages have to be.
            copies: what copies pages.
        """
        if self.links is not None:
            find = PageSources(self.server_dir, self.sources).find
            return PeerPages(
                find, self.links.key_dir, kind.namespace, kind.page_bytes, kind.texts, copies
            )  # fmt: skip
        root = Path(args.kv_cache_dir or self.directory).absolute()
        directories = [directory_of(root, number) for number in self.sources]
        if args.kv_cache_dir:
            return PeerFiles(directories, kind.namespace)
        return SharedPeers(directories, kind.namespace, kind.page_bytes, copies)

    def serve(self, replica: ReplicaPlace, kind: PageKind, on_error: Callable[[], object]) -> None:
        """Give the pages of this replica to those on other machines from now on, if there are any.

        Args:
            replica: which part of its machine this replica has.
            kind: what its pages are.
            on_error: as of PageServer.
        """
        if self.links is not None:
            directory = directory_of(Path(self.directory), replica.number)
            pages = SharedReader(directory, kind.namespace, kind.page_bytes)
            PageServer(self.links, pages, kind.texts, on_error)

    def has_memory(self, args: WorkerArgs) -> bool:
        """Return whether this replica keeps pages in shared memory for others."""
        return self.exports and not args.kv_cache_dir

    def open_memory(
        self,
        args: WorkerArgs,
        files: ModelFiles,
        runner: Runner,
        replica: ReplicaPlace,
        kind: PageKind,
        copies: PageCopies,
        num_spare: int,
    ) -> SharedPages:
        """Return the tier in which this replica keeps pages for others.

        Args:
            args: the worker's flags.
            files: the model.
            runner: what runs it.
            replica: the replica of this worker.
            kind: what its pages are.
            copies: what makes checksums.
            num_spare: as in SharedPages.

        Raises:
            ConfigError: there is no room for the longest prompt.
        """
        namespace, page_bytes = kind.namespace, kind.page_bytes
        remove_left_behind(Path(self.directory))
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        directory = directory_of(Path(self.directory), replica.number)
        max_pages = runner.table.num_pages
        if args.kv_offloading_size:
            max_pages = int(args.kv_offloading_size * GIB / replica.num_replicas) // page_bytes
        longest = -(-files.context_length // runner.table.page_size) + 1
        needed = min(longest, max_pages)
        if not shared_file(directory, namespace).exists():  # its memory is not free then
            room = places_in(self._room(), page_bytes) - num_spare
            if room < needed:
                raise self._no_room(file_bytes(page_bytes, needed + num_spare))
            max_pages = min(max_pages, room)
        return SharedPages(directory, namespace, page_bytes, max_pages, copies, num_spare)

    def _room(self) -> int:
        """Return the bytes that this replica may use."""
        free_bytes = shutil.disk_usage(self.directory).free
        if Path(self.directory).is_relative_to(SHARED_MEMORY):
            free_bytes = min(free_bytes, free_memory(torch.device("cpu")))
        return int(EXCHANGE_SHARE * free_bytes / (1 + len(self.sources)))

    def _no_room(self, needed: int) -> ConfigError:
        return ConfigError(
            f"--prefill-replicas exchanges KV pages in {self.directory}, where"
            f" {self._room() / GIB:.2f} GiB are free for each replica that computes prompts, and a"
            f" prompt of this model takes up to {needed / GIB:.2f} GiB: make room, or name"
            " another directory by --kv-cache-dir"
        )


def directory_of(root: Path, number: int) -> Path:
    """Return the directory of a replica's pages. root: that of all replicas."""
    return root / f"{REPLICA_PREFIX}{number}" if number else root
