"""The exchange of KV pages between replicas with roles (--prefill-replicas).

A replica that computes prompts for others keeps their pages in a tier of files in shared memory.
The other replicas of the machine read these files as a tier of their own, which may lose pages at
any time.
"""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import (
    REPLICA_PREFIX,
    ReplicaArgs,
    ReplicaPlace,
    WorkerArgs,
)
from quadriga.server.models.resolve import ModelFiles
from quadriga.server.processes.run_dir import SHARED_MEMORY, remove_left_behind
from worker_proc.kv_tiers.tiers import HEADER, PeerFiles
from worker_proc.startup.devices import free_memory
from worker_proc.step.runner import Runner

GIB = 2**30
# Of the free memory or disk with the pages of all replicas together.
EXCHANGE_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class PageExchange:
    """How a replica takes part.

    Attributes:
        directory: of the pages of all replicas, unless --kv-cache-dir names another one.
        exports: this replica writes the pages of prompts there, for others.
        sources: numbers of the other replicas that do.
    """

    directory: str
    exports: bool
    sources: tuple[int, ...]

    @classmethod
    def of(cls, args: ReplicaArgs, replica: ReplicaPlace, directory: str) -> "PageExchange | None":
        """Return the part of a replica; None where replicas have no roles."""
        if not args.has_roles:
            return None
        sources = [number for number in range(args.prefill_replicas) if number != replica.number]
        return cls(directory, args.computes_prompts(replica.number), tuple(sources))

    def peers(self, args: WorkerArgs, namespace: bytes) -> PeerFiles:
        """Return the tiers of the other replicas. namespace: as in PeerFiles."""
        root = Path(args.kv_cache_dir or self.directory).absolute()
        return PeerFiles([directory_of(root, number) for number in self.sources], namespace)

    def flags(
        self,
        args: WorkerArgs,
        files: ModelFiles,
        runner: Runner,
        replica: ReplicaPlace,
        page_bytes: int,
    ) -> WorkerArgs:
        """Return flags with the tier in which this replica keeps pages for others.

        Raises:
            ConfigError: there is no room for the longest prompt.
        """
        if args.kv_cache_dir or not self.exports:
            return args
        remove_left_behind()
        Path(self.directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        num_bytes = self._num_bytes(runner, files.context_length, page_bytes)
        size = num_bytes * replica.num_replicas / GIB  # of all replicas
        return replace(args, kv_cache_dir=self.directory, kv_cache_dir_size=size)

    def _num_bytes(self, runner: Runner, context: int, page_bytes: int) -> int:
        """Return the size of all pages that are kept: as much as the pool, if there is room."""
        free_bytes = shutil.disk_usage(self.directory).free
        if Path(self.directory).is_relative_to(SHARED_MEMORY):
            free_bytes = min(free_bytes, free_memory(torch.device("cpu")))
        room = int(EXCHANGE_SHARE * free_bytes / (1 + len(self.sources)))
        table, file_bytes = runner.table, HEADER.size + page_bytes
        longest = -(-context // table.page_size) + 1
        needed = min(longest, table.num_pages) * file_bytes
        if room < needed:
            raise ConfigError(
                f"--prefill-replicas exchanges KV pages in {self.directory}, where"
                f" {room / GIB:.2f} GiB are free for each replica that computes prompts, and a"
                f" prompt of this model takes up to {needed / GIB:.2f} GiB: make room, or name"
                " another directory by --kv-cache-dir"
            )
        return min(room, table.num_pages * file_bytes)


def directory_of(root: Path, number: int) -> Path:
    """Return the directory of a replica's pages. root: that of all replicas."""
    return root / f"{REPLICA_PREFIX}{number}" if number else root
