"""Copy KV pages between a GPU and pinned memory, and compare answers with and without the tiers.

    python -m bench.gpu.tiers --model DIR --load-format dummy
    python -m bench.gpu.tiers --model DIR --load-format dummy --device cpu --megabytes 4

The first table has GB/s of pages that leave the pool for the tier in memory and come back, as a
server moves them, beside one plain copy of pinned memory. The second one has answers of servers:
without tiers; with pages that left a small pool and came back; and after a restart, with pages from
disk. The exit code is 1 if an answer differs, or if no page came back.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command
from bench.gpu.ceilings import seconds_of
from bench.report.table import FigureRow, add_json_flag, show
from quadriga import LLM, SamplingParams
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import LoadPages, PagesLoaded, StoredPages, StorePages
from worker_proc.kv_tiers.page_mover import PageMover, Report
from worker_proc.kv_tiers.pool_pages import CudaStream, DevicePool, HostStream
from worker_proc.kv_tiers.tiers import HostPages
from worker_proc.startup.devices import choose_device

PAGE_SIZE = 16
# Layers, heads of keys, head dimension, number format.
SHAPES = {
    "8B, bfloat16": (32, 8, 128, torch.bfloat16),
    "8B, fp8": (32, 8, 128, torch.float8_e4m3fn),
    "GPT-2, bfloat16": (12, 12, 64, torch.bfloat16),
}
PLAIN_BYTES = 2**28
# The pool holds one of the prompts and a part of the next.
NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS, POOL_TOKENS = 4, 900, 32, 1280
NAME_BYTES = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and compare what the command line describes, and return the exit code."""
    parser = command_parser("bench.gpu.tiers", __doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="of the servers")
    parser.add_argument("--load-format", default="auto", help="as of quadriga serve")
    parser.add_argument("--device", default="cuda", help="(default: cuda)")
    parser.add_argument("--attention-backend", default="auto", help="as of quadriga serve")
    parser.add_argument(
        "--megabytes", type=int, default=1024, help="of the pages that move (default: 1024)"
    )
    add_json_flag(parser)
    arguments = parser.parse_args(argv)
    return run_command("bench.gpu.tiers", lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> int:
    device = choose_device(arguments.device)
    num_bytes = arguments.megabytes * 2**20
    rows = [_plain(device, min(num_bytes, PLAIN_BYTES))]
    rows += [_pages(name, device, num_bytes) for name in SHAPES]
    show(f"copies of KV pages on {device}", rows, arguments.json)
    answers = _answers(arguments, device)
    show("answers", answers, arguments.json)
    return EXIT_OK if all(row["equal"] == "yes" for row in answers) else EXIT_FAILED


def _plain(device: torch.device, num_bytes: int) -> FigureRow:
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = seconds_of(lambda: on_host.copy_(on_device, non_blocking=True), device)
    back = seconds_of(lambda: on_device.copy_(on_host, non_blocking=True), device)
    return _row("a plain copy of pinned memory", num_bytes, num_bytes, out, back)


def _row(name: str, piece_bytes: int, num_bytes: int, out: float, back: float) -> FigureRow:
    return {
        "what": name,
        "bytes of each": piece_bytes,
        "to the host, GB/s": num_bytes / out / 1e9,
        "to the device, GB/s": num_bytes / back / 1e9,
    }


def _pages(name: str, device: torch.device, num_bytes: int) -> FigureRow:
    """Store a pool in the tier in memory and load it, twice; the second time counts."""
    layers, heads, head_dim, dtype = SHAPES[name]
    page_bytes = layers * 2 * PAGE_SIZE * heads * head_dim * dtype.itemsize
    num_pages = max(2, num_bytes // page_bytes)
    shape = (layers * 2, num_pages, PAGE_SIZE, heads, head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    moved = _Moved.of(pool, num_pages)
    moved.run()
    out, back = moved.run()
    return _row(f"pages of {name}", page_bytes, num_pages * page_bytes, out, back)


@dataclass(frozen=True, slots=True)
class _Moved:
    """What moves the pages of a pool, and its reports."""

    mover: PageMover
    pages: list[int]
    reports: "SimpleQueue[Report]"

    @classmethod
    def of(cls, pool: Tensor, num_pages: int) -> "_Moved":
        reports: SimpleQueue[Report] = SimpleQueue()
        stream = CudaStream(pool.device) if pool.device.type == "cuda" else HostStream()
        mover = PageMover(
            DevicePool([pool], stream), PAGE_SIZE, HostPages(num_pages), None,
            lambda: reports.put, lambda: None,
        )  # fmt: skip
        mover.begin_session(1)
        return cls(mover, list(range(num_pages)), reports)

    def run(self) -> tuple[float, float]:
        """Return the seconds in which all pages leave, and in which they come back."""
        names = b"".join(page.to_bytes(NAME_BYTES, "big") for page in self.pages)
        began = time.perf_counter()
        self.mover.store(StorePages(pack_ids(self.pages), names))
        num_stored = 0
        while num_stored < len(self.pages):
            report = self.reports.get()
            assert isinstance(report, StoredPages)
            num_stored += len(report.added) // NAME_BYTES
        stored = time.perf_counter()
        self.mover.load(LoadPages(1, pack_ids(self.pages), names))
        loaded = self.reports.get()
        assert isinstance(loaded, PagesLoaded)
        assert loaded.num_loaded == len(self.pages)
        return stored - began, time.perf_counter() - stored


def _answers(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Compare greedy answers to the same prompts, which exceed the pool together."""
    flags: dict[str, Any] = {
        "device": str(device),
        "load_format": arguments.load_format,
        "attention_backend": arguments.attention_backend,
        "max_total_tokens": POOL_TOKENS,
        "max_running_requests": 4,
        "max_batch_size": 4,
    }
    if device.type == "cuda":  # however a prompt is cut, the numbers are the same
        flags["enable_deterministic_inference"] = True
    else:
        flags["dtype"] = "float32"
    expected, _ = _generate(arguments.model, flags, 1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        on_disk = {"kv_cache_dir": directory}
        both = on_disk | {"kv_offloading_size": 0.25}
        for name, more, rounds in (("memory and disk", both, 2), ("after a restart", on_disk, 1)):
            found, num_loaded = _generate(arguments.model, flags | more, rounds)
            is_equal = found == expected * rounds and num_loaded > 0
            rows.append(
                {
                    "pages from": name,
                    "answers": len(found),
                    "tokens loaded": num_loaded,
                    "equal": "yes" if is_equal else "NO",
                }
            )
    return rows


def _generate(model: str, flags: dict[str, Any], rounds: int) -> tuple[list[list[int]], int]:
    """Return answers to one prompt after the other, and the number of tokens from the tiers."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    answers: list[list[int]] = []
    with LLM(model, **flags) as llm:
        for _ in range(rounds):
            for number in range(NUM_PROMPTS):
                prompt = [3 + (7 * number + 11 * i) % 997 for i in range(PROMPT_TOKENS)]
                answers.append(list(llm.generate(prompt, params).token_ids))
        num_loaded = int(llm.client.info().get("kv_offload_loaded_tokens_total", 0))
    return answers, num_loaded


if __name__ == "__main__":
    sys.exit(main())
