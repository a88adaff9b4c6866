"""How many tokens of prompts fill this machine: more of them in a step only wait for each other."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import EXTEND, NewSlot, StepPlan

if TYPE_CHECKING:
    from worker_proc.runner import Runner

ON_A_GPU = 8192
SIZES = (128, 256, 512, 1024)
"""Smaller steps may have the rate, but what comes with every step then counts too much."""
TIMES = 2
"""Each size is tried so often; the faster one counts."""
GOOD_RATE = 0.9
"""Of the best rate of tokens: the smallest step that reaches so much is the one to take."""
ENOUGH_SECONDS = 0.3
"""Nothing more is tried after so long: the start would be late for it."""


def tune_prefill_size(runner: "Runner", ranks: int = 1) -> int:
    """Tokens of a prefill step that reaches GOOD_RATE of what this machine does with more.

    Measured on a CPU, where the worker is one process: of several each would measure something
    else. It is done by prompts that leave nothing behind. A step of fewer tokens is bound by
    reading the weights, one of more makes the first prompts in it wait for the last.
    """
    table = runner.table
    if table.device.type != "cpu" or ranks > 1:
        return ON_A_GPU
    most = min(table.num_pages * table.page_size, table.context_length)
    sizes = [size for size in SIZES if size <= most]
    return choose(sizes, lambda size: _seconds(runner, size)) if sizes else most


def choose(sizes: list[int], seconds_of: Callable[[int], float]) -> int:
    """The smallest of these sizes, in ascending order, with a good rate; sizes that there was no
    time to measure do not count."""
    seconds: dict[int, float] = {}
    spent = 0.0
    for size in (size for size in sizes for _ in range(TIMES)):
        if spent >= ENOUGH_SECONDS:
            break
        now = seconds_of(size)
        spent += now
        seconds[size] = min(now, seconds.get(size, now))
    best = max(size / took for size, took in seconds.items())
    return next(size for size, took in seconds.items() if size / took >= GOOD_RATE * best)


def _seconds(runner: "Runner", tokens: int) -> float:
    """Of a prompt of so many tokens."""
    pages = range(-(-tokens // runner.table.page_size))
    slot = pack_ids([0])
    new = NewSlot(0, pack_ids([0] * tokens), 0, pack_ids(pages), 0.0, -1, 1.0, 0)
    began = time.perf_counter()
    runner.run(StepPlan(-1, EXTEND, slot, pack_ids([tokens]), [new], b""))
    took = time.perf_counter() - began
    runner.run(StepPlan(-1, EXTEND, b"", b"", [], slot))
    return took
