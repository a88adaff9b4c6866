"""Measure how fast KV pages move from one replica's pool to another's, beside a plain copy.

    python -m bench.page_moves
    python -m bench.page_moves --device cuda --prompt-tokens 7800

One `PageMover` stores the pages of a prompt in shared memory, as a replica does that computes
prompts. Another one loads them to its own pool, as a replica does that generates tokens: from that
memory, and from another process of this machine, whose pages are in files (--kv-cache-dir) and in
shared memory, and are sent by TCP as from another machine, without keys and with them. The first
time takes memory and maps it. `longest step` is that of small steps which go on meanwhile on the
same device, and `alone` the longest of those without pages that move.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.report.table import FigureRow, Value, add_json_flag, show
from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, page_hash
from quadriga.server.processes.run_dir import SHARED_MEMORY
from quadriga.wire.curve import make_server_keys
from quadriga.wire.links import NodeLinks, ReservedPort
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import LoadPages, PagesLoaded, StoredPages, StorePages
from worker_proc.kv_tiers.page_copies import page_copies
from worker_proc.kv_tiers.page_mover import PageMover, Report, num_spare_of
from worker_proc.kv_tiers.page_server import PageServer
from worker_proc.kv_tiers.peer_pages import PeerPages
from worker_proc.kv_tiers.pool_pages import CudaStream, DevicePool, HostPool, PoolPages
from worker_proc.kv_tiers.shared_pages import SharedPages, SharedPeers, SharedReader
from worker_proc.kv_tiers.tiers import HEADER, PageFiles, PeerFiles, PeerTier
from worker_proc.startup.devices import choose_device

PAGE_SIZE, NAMESPACE = 16, bytes(16)
FACTS: dict[str, str] = {}
# Layers, heads of keys, head dimension; in bfloat16.
SHAPES = {"cpu": ("SmolLM2-135M", 30, 3, 64), "cuda": ("8B", 32, 8, 128)}
STEP_SIZE, STEPS_ALONE = 256, 200  # rows and columns of the product that is a step
WAIT_S = 0.001
MS, MB, GB = 1000, 1e6, 1e9


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line describes, and return the exit code."""
    parser = command_parser("bench.page_moves", __doc__)
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--prompt-tokens", type=int, default=6000, metavar="N",
                        help="tokens whose pages move (default: 6000)")  # fmt: skip
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="(default: 5)")
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.page_moves", lambda: _measure(arguments))


def _measure(arguments: argparse.Namespace) -> int:
    device = choose_device(arguments.device)
    torch.set_num_threads(1)
    name, layers, heads, head_dim = SHAPES["cuda" if device.type == "cuda" else "cpu"]
    num_pages = -(-arguments.prompt_tokens // PAGE_SIZE)
    shape = (layers, num_pages, 2 * PAGE_SIZE * heads * head_dim)
    pools = [torch.randn(shape).to(torch.bfloat16).to(device) for _ in range(2)]
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        turns = _Turns(device, pools[0].nbytes, arguments.turns)
        rows = [turns.row("a plain copy", _plain_copy(pools))]
        rows += _moves(pools, Path(directory), turns)
    title = f"{num_pages} pages of {name}, {pools[0].nbytes / MB:.0f} MB, on {device}"
    show(title, rows, arguments.json)
    return EXIT_OK


def _plain_copy(pools: Sequence[Tensor]) -> Callable[[], object]:
    """Return a copy from pool to pool; on a GPU to pinned memory."""
    source, target = pools
    if source.device.type == "cuda":
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    return partial(target.copy_, source)


def _moves(pools: Sequence[Tensor], directory: Path, turns: "_Turns") -> list[FigureRow]:
    """Let pages move in every way, and return the rows of the table."""
    source, target = (_pages_of(pool) for pool in pools)
    num_pages, page_bytes, copies = pools[0].shape[1], source.page_bytes, page_copies()
    own, keys = directory / "own", str(directory / "keys")
    make_server_keys(Path(keys))
    shared = SharedPages(
        own, NAMESPACE, page_bytes, num_pages, page_copies(may_compile=True), num_spare_of(source)
    )
    source.take_from(shared)
    storing = _Transfers(source, num_pages, memory=shared)
    loading = _Transfers(target, num_pages, SharedPeers([own], NAMESPACE, page_bytes, copies))
    rows = [turns.first("store, the first time", storing.store), turns.row("store", storing.store)]
    rows += [turns.first("load, the first time", loading.load), turns.row("load", loading.load)]
    assert torch.equal(*pools), "pages are not what they were"
    with _other_process(directory, num_pages, page_bytes, keys) as addresses:

        def by_tcp(address: str, key_dir: str) -> PeerPages:
            find = {0: address}.copy
            return PeerPages(find, key_dir, NAMESPACE, page_bytes, FACTS, copies)

        others: dict[str, PeerTier] = {
            "shared memory": SharedPeers([directory / "pages"], NAMESPACE, page_bytes, copies),
            "files": PeerFiles([directory / "files"], NAMESPACE),
            "TCP": by_tcp(addresses[0], ""),
            "TCP with keys": by_tcp(addresses[1], keys),
        }
        for name, tier in others.items():
            load = _Transfers(target, num_pages, tier).load
            load()
            rows.append(turns.row(f"load from another process, {name}", load))
    return rows


def _pages_of(pool: Tensor) -> PoolPages:
    if pool.device.type == "cuda":
        return DevicePool([pool], CudaStream(pool.device))
    return HostPool(list(pool))


def _names(num_pages: int) -> list[bytes]:
    return [page_hash(b"", page.to_bytes(8, "big")) for page in range(num_pages)]


class _Transfers:
    """The pages of a prompt on their way out of a pool or into it.

    Args:
        pages: the pool.
        num_pages: of the prompt.
        peers: what they are loaded from.
        memory: what they are stored in.
    """

    def __init__(
        self,
        pages: PoolPages,
        num_pages: int,
        peers: PeerTier | None = None,
        memory: SharedPages | None = None,
    ) -> None:
        self._reports: SimpleQueue[Report] = SimpleQueue()
        self._mover = PageMover(
            pages, PAGE_SIZE, memory, None, lambda: self._reports.put, lambda: None, peers,
            niceness=0,
        )  # fmt: skip
        self._mover.begin_session(1)
        self._num_pages = num_pages
        self._pages, self._hashes = pack_ids(range(num_pages)), b"".join(_names(num_pages))

    def store(self) -> None:
        """Store the pages, and wait for it."""
        self._mover.store(StorePages(self._pages, self._hashes))
        num_stored = 0
        while num_stored < self._num_pages:
            report = self._reports.get()
            assert isinstance(report, StoredPages)
            num_stored += len(report.added) // PAGE_HASH_BYTES

    def load(self) -> None:
        """Load the pages, and wait for it."""
        self._mover.load(LoadPages(1, self._pages, self._hashes))
        report = self._reports.get()
        assert isinstance(report, PagesLoaded)
        assert report.num_loaded == report.num_fetched == self._num_pages


# --- the other process ----------------------------------------------------------------------------


@contextmanager
def _other_process(
    directory: Path, num_pages: int, page_bytes: int, keys: str
) -> Iterator[Sequence[str]]:
    """Run a process that keeps pages. Yield where it sends them, without keys and with them."""
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
    """Keep pages in files and in shared memory, and send them, until the other end is closed."""
    files = PageFiles(
        directory / "files", NAMESPACE, page_bytes, num_pages * (page_bytes + HEADER.size)
    )
    pages = SharedPages(directory / "pages", NAMESPACE, page_bytes, num_pages, page_copies())
    for number, name in enumerate(_names(num_pages)):
        memory = pages.take()
        assert memory is not None
        memory[:] = np.random.default_rng(number).integers(0, 256, page_bytes, dtype=np.uint8)
        files.write(name, memory)
        pages.keep(name, memory)
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


# --- figures --------------------------------------------------------------------------------------


class _Turns:
    """Measures what moves a number of bytes.

    Args:
        device: of the steps that go on meanwhile.
        num_bytes: that move.
        num_turns: of each way.
    """

    def __init__(self, device: torch.device, num_bytes: int, num_turns: int) -> None:
        self._device, self._num_bytes, self._num_turns = device, num_bytes, num_turns
        alone = _Steps(device)
        alone.run(lambda: alone.num_steps >= STEPS_ALONE)
        self._alone_s = alone.longest

    def first(self, what: str, work: Callable[[], object]) -> FigureRow:
        """Measure the only turn of something."""
        return self._times(what, work, 1)

    def row(self, what: str, work: Callable[[], object]) -> FigureRow:
        """Measure the turns of something, and the steps beside them."""
        times = self._times(what, work, self._num_turns)
        longest = self._longest_step_beside(work)
        return {**times, "longest step, ms": MS * longest, "alone, ms": MS * self._alone_s}

    def _times(self, what: str, work: Callable[[], object], num_turns: int) -> dict[str, Value]:
        wall, used = list[float](), list[float]()
        for _ in range(num_turns):
            began, began_cpu = time.perf_counter(), time.process_time()
            work()
            wall.append(time.perf_counter() - began)
            used.append(time.process_time() - began_cpu)
        return {
            "what": what,
            "ms, median": MS * statistics.median(wall),
            "best": MS * min(wall),
            "GB/s, best": self._num_bytes / min(wall) / GB,
            "ms of this process's CPU": MS * statistics.median(used),
        }

    def _longest_step_beside(self, work: Callable[[], object]) -> float:
        """Return the seconds of the longest step while something runs."""
        steps, is_over = _Steps(self._device), threading.Event()
        thread = threading.Thread(target=steps.run, args=(is_over.is_set,))
        thread.start()
        while not steps.num_steps:
            time.sleep(WAIT_S)
        for _ in range(self._num_turns):
            work()
        is_over.set()
        thread.join()
        return steps.longest


class _Steps:
    """Small steps of a device, one after the other.

    Attributes:
        num_steps: number of steps.
        longest: seconds of the longest one.
    """

    def __init__(self, device: torch.device) -> None:
        self._matrix = torch.zeros(STEP_SIZE, STEP_SIZE, device=device)
        self.num_steps, self.longest = 0, 0.0

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run steps until something is over. The first one, which takes longer, does not count."""
        torch.set_num_threads(1)  # of this thread
        (self._matrix @ self._matrix)[0, 0].item()
        while not is_over():
            began = time.perf_counter()
            (self._matrix @ self._matrix)[0, 0].item()
            self.longest = max(self.longest, time.perf_counter() - began)
            self.num_steps += 1


if __name__ == "__main__":
    sys.exit(main())
