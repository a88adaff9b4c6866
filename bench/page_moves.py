"""Measure how fast KV pages come from another replica, beside a copy of as many bytes in memory.

    python -m bench.page_moves --prompt-tokens 6000

The other replica is a process of its own on this machine. Its pages are read from files
(--kv-cache-dir), from shared memory, and by TCP as from another machine, without keys and with
them. By default pages are as large as those of SmolLM2-135M in bfloat16. The first turn of each way
does not count.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.report.table import FigureRow, add_json_flag, show
from quadriga.wire.curve import make_server_keys
from quadriga.wire.links import NodeLinks, ReservedPort
from worker_proc.kv_tiers.page_copies import PagePlace, Pieces, page_copies
from worker_proc.kv_tiers.page_server import PageServer
from worker_proc.kv_tiers.peer_pages import PeerPages
from worker_proc.kv_tiers.shared_pages import SharedPages, SharedPeers, SharedReader
from worker_proc.kv_tiers.tiers import HEADER, PageFiles, PeerFiles, PeerTier

NAMESPACE = bytes(16)
NAME_BYTES = 16
FACTS: dict[str, str] = {}
MS, MB, GB = 1000, 1e6, 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code."""
    parser = command_parser("bench.page_moves", __doc__)
    parser.add_argument("--prompt-tokens", type=int, default=6000, metavar="N",
                        help="tokens whose pages move (default: 6000)")  # fmt: skip
    parser.add_argument("--page-tokens", type=int, default=16, metavar="N",
                        help="tokens of a page (default: 16)")  # fmt: skip
    parser.add_argument("--token-bytes", type=int, default=23040, metavar="N",
                        help="of the keys and values of a token (default: 23040)")  # fmt: skip
    parser.add_argument("--layers", type=int, default=30, metavar="N",
                        help="pieces of a page in the pool (default: 30)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="(default: 5)")
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.page_moves", lambda: _measure(arguments))


class _Pool:
    """The pool of the replica that loads pages.

    Args:
        num_pages: of the prompt.
        page_bytes: size of a page.
        num_layers: pieces of each page.
    """

    def __init__(self, num_pages: int, page_bytes: int, num_layers: int) -> None:
        shape = num_pages, page_bytes // num_layers
        self._parts = [np.zeros(shape, np.uint8) for _ in range(num_layers)]
        self._copied = [np.ones(shape, np.uint8) for _ in range(num_layers)]
        self._pieces = Pieces(self._parts)
        self.num_pages, self.num_bytes = num_pages, num_pages * page_bytes

    def load(self, tier: PeerTier) -> None:
        """Load the pages of a prompt, as the thread of a worker does."""
        names = [_name_of(number) for number in range(self.num_pages)]
        tier.begin(names, lambda: True, time.monotonic())
        for number, name in enumerate(names):
            if not tier.read(name, PagePlace(self._pieces, number)):
                raise RuntimeError(f"page {number} of {self.num_pages} has not come")

    def copy(self) -> None:
        """Copy as many bytes from memory."""
        for part, other in zip(self._parts, self._copied, strict=True):
            np.copyto(part, other)


def _measure(arguments: argparse.Namespace) -> int:
    num_pages = -(-arguments.prompt_tokens // arguments.page_tokens)
    page_bytes = arguments.page_tokens * arguments.token_bytes
    pool = _Pool(num_pages, page_bytes, arguments.layers)
    rows = [_row("a copy in memory", pool, pool.copy, arguments.turns)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as text:
        directory = Path(text)
        keys = str(directory / "keys")
        make_server_keys(Path(keys))
        with _other_replica(directory, num_pages, page_bytes, keys) as addresses:
            copies = page_copies()

            def by_tcp(address: str, key_dir: str) -> PeerPages:
                find = {0: address}.copy
                return PeerPages(find, key_dir, NAMESPACE, page_bytes, FACTS, copies)

            ways: dict[str, PeerTier] = {
                "files in /dev/shm": PeerFiles([directory / "files"], NAMESPACE),
                "shared memory": SharedPeers([directory / "pages"], NAMESPACE, page_bytes, copies),
                "TCP": by_tcp(addresses[0], ""),
                "TCP with keys": by_tcp(addresses[1], keys),
            }
            for name, tier in ways.items():
                rows.append(_row(name, pool, partial(pool.load, tier), arguments.turns))
    title = f"{num_pages} pages, {pool.num_bytes / MB:.0f} MB, {arguments.turns} turns"
    show(title, rows, arguments.json)
    return EXIT_OK


def _row(name: str, pool: _Pool, load: Callable[[], None], num_turns: int) -> FigureRow:
    load()
    wall, used = list[float](), list[float]()
    for _ in range(num_turns):
        began, began_cpu = time.perf_counter(), time.process_time()
        load()
        wall.append(time.perf_counter() - began)
        used.append(time.process_time() - began_cpu)
    best = min(wall)
    return {
        "from": name,
        "ms, median": MS * statistics.median(wall),
        "best": MS * best,
        "GB/s, best": pool.num_bytes / best / GB,
        "ms of this process's CPU": MS * statistics.median(used),
    }


def _name_of(number: int) -> bytes:
    """Return a name as good as a hash."""
    return np.random.default_rng(number).bytes(NAME_BYTES)


@contextmanager
def _other_replica(
    directory: Path, num_pages: int, page_bytes: int, keys: str
) -> Iterator[Sequence[str]]:
    """Run a process that keeps the pages. Yield where it gives them, without keys and with them."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_keep_pages, args=(theirs, directory, num_pages, page_bytes, keys), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _keep_pages(
    control: Connection, directory: Path, num_pages: int, page_bytes: int, keys: str
) -> None:
    """Keep pages in files and in shared memory, and give them, until the other end is closed."""
    files = PageFiles(
        directory / "files", NAMESPACE, page_bytes, num_pages * (page_bytes + HEADER.size)
    )
    pages = SharedPages(directory / "pages", NAMESPACE, page_bytes, num_pages, page_copies())
    for number in range(num_pages):
        memory = pages.take()
        assert memory is not None
        memory[:] = np.random.default_rng(number).integers(0, 256, page_bytes, dtype=np.uint8)
        files.write(_name_of(number), memory)
        pages.keep(_name_of(number), memory)
    ports = [ReservedPort("127.0.0.1") for _ in range(2)]
    reader = SharedReader(directory / "pages", NAMESPACE, page_bytes)
    for port, key_dir in zip(ports, ("", keys), strict=True):
        links = NodeLinks(pages=port.address, key_dir=key_dir)
        PageServer(links, reader, FACTS, lambda: os._exit(1))
    control.send([port.address for port in ports])
    while control.poll(None):
        try:
            control.recv()
        except EOFError:
            return


if __name__ == "__main__":
    sys.exit(main())
