"""How much memory a step takes at most, beside weights and pages."""

from collections.abc import Callable

import torch

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import ConfigError
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import EXTEND, NewSlot, StepPlan
from worker_proc.models.base import Model

MEBIBYTE = 2**20


def largest_step(args: SchedulerArgs, chunk: int, context: int, page_size: int) -> StepPlan:
    """As many prompt tokens as a step may have, in as many rows as it may admit, all of them
    drawn. chunk: tokens of a step where the flags leave it open."""
    tokens = args.prefill_budget(chunk)
    rows = min(args.prefill_width, args.max_running_requests, tokens)
    length = max(1, min(tokens // rows, context - 1))
    pages = -(-length // page_size)
    new = [
        NewSlot(
            slot, pack_ids([0] * length), 0, pack_ids(range(slot * pages, (slot + 1) * pages)),
            1.0, -1, 1.0, slot,
        )
        for slot in range(rows)
    ]  # fmt: skip
    return StepPlan(-1, EXTEND, pack_ids(range(rows)), pack_ids([length] * rows), new, b"")


def pages_of(plan: StepPlan) -> int:
    """That a plan which begins with an empty pool needs."""
    return sum(len(one.pages) // 4 for one in plan.new)


def peak_gpu_bytes(run: Callable[[], object], device: torch.device) -> int:
    """That running this takes for a while."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def check_weights(model: Model, dtype: torch.dtype, free: int, device: torch.device) -> None:
    """ConfigError where a model, without storage yet, does not fit into so many free bytes."""
    needed = sum(weight.numel() * dtype.itemsize for weight in model.parameters())
    if needed > free:
        raise ConfigError(
            f"the model's weights take {needed / MEBIBYTE:.0f} MiB in"
            f" {str(dtype).removeprefix('torch.')}, but {device} has {free / MEBIBYTE:.0f} MiB"
            " free; take a smaller model, fewer bits with --dtype, or more cards with --tp"
        )
