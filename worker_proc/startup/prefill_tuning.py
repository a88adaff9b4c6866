"""Measures how many prompt tokens in one step fill this machine.

More of them bring no higher rate: they only wait for each other.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quadriga.server.config.engine_args import GPU_PREFILL_TOKENS
from worker_proc.step.dummy_plans import prefill_plan, release_plan

if TYPE_CHECKING:
    from worker_proc.step.runner import Runner  # the simulator uses this module without torch

# A smaller step may have the rate, but what comes with every step then counts too much.
CANDIDATE_SIZES = (128, 256, 512, 1024)
NUM_TRIES = 2  # the faster one of a size counts
GOOD_FRACTION = 0.9  # of the best rate; the smallest size that reaches it is taken
MAX_TUNING_S = 0.3  # no further size is tried after that, which would delay the start
# Of a model that makes no text, only vectors: its steps hold up no stream, and a step of many short
# texts costs less than many steps. A text that comes waits for the step that runs.
VECTOR_SIZES = (*CANDIDATE_SIZES, 2048)
MAX_VECTOR_STEP_S = 0.05
TEXT_TOKENS = 128  # of each text of such a step


def tune_prefill_size(runner: "Runner", num_ranks: int = 1) -> int:
    """Return how many prompt tokens a prefill step should have.

    A smaller step is bound by reading the weights; a larger one makes the first prompts in it wait
    for the last. Measured, with prompts that leave nothing behind, only on a CPU with a single
    rank: several ranks would each measure another size.
    """
    table = runner.table
    if table.device.type != "cpu" or num_ranks > 1:
        return GPU_PREFILL_TOKENS
    if runner.only_pooling is not None:
        most = min(table.num_pages * table.page_size, table.num_slots * _text_tokens(runner))
        sizes = [size for size in VECTOR_SIZES if size <= most] or [most]
        return largest_quick_size(sizes, lambda size: _texts_s(runner, size))
    max_size = min(table.num_pages * table.page_size, table.context_length)
    sizes = [size for size in CANDIDATE_SIZES if size <= max_size]
    return smallest_good_size(sizes, lambda size: _prefill_s(runner, size)) if sizes else max_size


def smallest_good_size(sizes: list[int], measure_s: Callable[[int], float]) -> int:
    """Return the smallest of `sizes` with a rate of at least GOOD_FRACTION of the best.

    Args:
        sizes: ascending. Those that there is no time to measure do not count.
        measure_s: runs a step of a size and returns its seconds.
    """
    seconds: dict[int, float] = {}
    spent_s = 0.0
    for size in (size for size in sizes for _ in range(NUM_TRIES)):
        if spent_s >= MAX_TUNING_S:
            break
        if len(seconds) == 1 and size in seconds and spent_s + seconds[size] >= MAX_TUNING_S:
            break  # a second try would leave no time for a size to compare it with
        took_s = measure_s(size)
        spent_s += took_s
        seconds[size] = min(took_s, seconds.get(size, took_s))
    best_rate = max(size / took_s for size, took_s in seconds.items())
    return next(s for s, took_s in seconds.items() if s / took_s >= GOOD_FRACTION * best_rate)


def largest_quick_size(sizes: Sequence[int], measure_s: Callable[[int], float]) -> int:
    """Return the largest of ascending `sizes` whose step takes at most MAX_VECTOR_STEP_S.

    Args:
        sizes: the first one is returned if it takes longer, too.
        measure_s: runs a step of a size and returns its seconds.
    """
    largest = sizes[0]
    for size in sizes:
        if min(measure_s(size) for _ in range(NUM_TRIES)) > MAX_VECTOR_STEP_S:
            break
        largest = size
    return largest


def _text_tokens(runner: "Runner") -> int:
    return min(TEXT_TOKENS, runner.table.context_length)


def _texts_s(runner: "Runner", num_tokens: int) -> float:
    """Return the seconds that a step of several texts takes."""
    length = min(_text_tokens(runner), num_tokens)
    num_rows = num_tokens // length
    plan = prefill_plan(length, runner.table.page_size, num_rows, pooling=runner.only_pooling)
    started_at = time.perf_counter()
    runner.run(plan)
    took_s = time.perf_counter() - started_at
    runner.run(release_plan(num_rows))
    return took_s


def _prefill_s(runner: "Runner", num_tokens: int) -> float:
    """Return the seconds that a prompt takes."""
    started_at = time.perf_counter()
    runner.run(prefill_plan(num_tokens, runner.table.page_size, pooling=runner.only_pooling))
    took_s = time.perf_counter() - started_at
    runner.run(release_plan())
    return took_s
