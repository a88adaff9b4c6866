"""Measure how KV pages move from one replica's pool to another's, beside a plain copy.

    python -m bench.page_copies
    python -m bench.page_copies --device cuda --megabytes 1024

Both sides are in this process: one `PageMover` stores the pages of a pool in shared memory, as a
replica does that computes prompts, and another one loads them to its own pool, as one does that
generates tokens. The first time takes the memory and maps it. `longest step` is that of small steps
which go on meanwhile on the same device, and `alone` the longest of those without pages that move.
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.report.table import FigureRow, add_json_flag, show
from quadriga.server.prefix_blocks import PAGE_HASH_BYTES, page_hash
from quadriga.server.processes.run_dir import SHARED_MEMORY
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import LoadPages, PagesLoaded, StoredPages, StorePages
from worker_proc.kv_tiers.page_copies import page_copies
from worker_proc.kv_tiers.page_mover import PageMover, Report, num_spare_of
from worker_proc.kv_tiers.pool_pages import CudaStream, DevicePool, HostPool, PoolPages
from worker_proc.kv_tiers.shared_pages import SharedPages, SharedPeers
from worker_proc.startup.devices import choose_device

PAGE_SIZE, NAMESPACE = 16, bytes(16)
# Layers, heads of keys, head dimension; in bfloat16.
SHAPES = {"cpu": ("SmolLM2-135M", 30, 3, 64), "cuda": ("8B", 32, 8, 128)}
ROUNDS = 5
STEP_SIZE, STEPS_ALONE = 256, 200  # rows and columns of the product that is a step
WAIT_S = 0.001
MS, MB = 1000, 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the command line describes, and return the exit code."""
    parser = command_parser("bench.page_copies", __doc__)
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument(
        "--megabytes", type=int, default=143, metavar="MB", help="of the pages (default: 143)"
    )
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.page_copies", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    device = choose_device(arguments.device)
    torch.set_num_threads(1)
    name, layers, heads, head_dim = SHAPES["cuda" if device.type == "cuda" else "cpu"]
    page_bytes = layers * 2 * PAGE_SIZE * heads * head_dim * 2
    num_pages = max(1, int(arguments.megabytes * MB) // page_bytes)
    shape = (layers, num_pages, 2 * PAGE_SIZE * heads * head_dim)
    pools = [torch.randn(shape).to(torch.bfloat16).to(device) for _ in range(2)]
    place = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        rows = _rows(pools, Path(directory), num_pages)
    assert torch.equal(*pools), "pages are not what they were"
    plain = _best(lambda: pools[1].copy_(pools[0])) if device.type == "cpu" else _to_host(pools[0])
    title = f"{num_pages} pages of {name}, {num_pages * page_bytes / MB:.0f} MB, on {device}"
    show(title, [{"what": "a plain copy", "ms": MS * plain}, *rows], arguments.json)
    return EXIT_OK


def _pages_of(pool: Tensor) -> PoolPages:
    if pool.device.type == "cuda":
        return DevicePool([pool], CudaStream(pool.device))
    return HostPool(list(pool))


def _rows(pools: Sequence[Tensor], directory: Path, num_pages: int) -> Sequence[FigureRow]:
    source, target = (_pages_of(pool) for pool in pools)
    shared = SharedPages(
        directory, NAMESPACE, source.page_bytes, num_pages, page_copies(may_compile=True),
        num_spare_of(source),
    )  # fmt: skip
    source.take_from(shared)
    peers = SharedPeers([directory], NAMESPACE, source.page_bytes, page_copies())
    reports: SimpleQueue[Report] = SimpleQueue()

    def mover_of(
        pages: PoolPages, memory: SharedPages | None, other: SharedPeers | None
    ) -> PageMover:
        mover = PageMover(
            pages, PAGE_SIZE, memory, None, lambda: reports.put, lambda: None, other, niceness=0
        )
        mover.begin_session(1)
        return mover

    storing, loading = mover_of(source, shared, None), mover_of(target, None, peers)
    pages = pack_ids(range(num_pages))
    names = b"".join(page_hash(b"", page.to_bytes(8, "big")) for page in range(num_pages))

    def store() -> None:
        storing.store(StorePages(pages, names))
        num_stored = 0
        while num_stored < num_pages:
            report = reports.get()
            assert isinstance(report, StoredPages)
            num_stored += len(report.added) // PAGE_HASH_BYTES

    def load() -> None:
        loading.load(LoadPages(1, pages, names))
        report = reports.get()
        assert isinstance(report, PagesLoaded)
        assert report.num_loaded == report.num_fetched == num_pages

    alone = _Steps(pools[0].device)
    alone.run(lambda: alone.num_steps >= STEPS_ALONE)
    rows: list[dict[str, str | int | float | None]]
    rows = [_row("store, the first time", store, 1), _row("store", store, ROUNDS)]
    rows += [_row("load, the first time", load, 1), _row("load", load, ROUNDS)]
    for row, work in zip(rows[1::2], (store, load), strict=True):
        row["longest step, ms"] = MS * _longest_step_beside(work, pools[0].device)
        row["alone, ms"] = MS * alone.longest
    return rows


def _row(name: str, work: Callable[[], None], rounds: int) -> dict[str, str | int | float | None]:
    return {"what": name, "ms": MS * _best(work, rounds)}


def _best(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the seconds of the fastest round."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def _to_host(pool: Tensor) -> float:
    """Return the seconds of a copy to pinned memory."""
    on_host = torch.empty(pool.shape, dtype=pool.dtype, pin_memory=True)
    return _best(lambda: on_host.copy_(pool))


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


def _longest_step_beside(work: Callable[[], None], device: torch.device) -> float:
    steps, is_over = _Steps(device), threading.Event()
    thread = threading.Thread(target=steps.run, args=(is_over.is_set,))
    thread.start()
    while not steps.num_steps:
        time.sleep(WAIT_S)
    for _ in range(ROUNDS):
        work()
    is_over.set()
    thread.join()
    return steps.longest


if __name__ == "__main__":
    sys.exit(main())
