"""The plans to which a cost model is fitted, and how long the real worker takes for each."""

import random
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bench.simulate.cost_model import Features, features_of
from bench.worker_steps import MAX_ROWS, Case, Row, WorkerBench

Floats = npt.NDArray[np.float64]
QUICK_STRIDE = 4
QUICK_ROW_TOKENS = 320  # of the KV pool, for each of MAX_ROWS rows
QUICK_TOKENS = QUICK_ROW_TOKENS * MAX_ROWS * 3 // 4


def design(seed: int = 0) -> list[Case]:
    """Return plans that cover what a server runs.

    Decodes at several widths and contexts, prefills with and without a context, chunks that sample
    nothing, and mixtures.
    """
    source = random.Random(seed)

    def ragged(rows: int, low: int, high: int, prefill: bool) -> Case:
        drawn = (source.randrange(low, high) for _ in range(rows))
        return tuple(Row(0, n) if prefill else Row(n, 1) for n in drawn)

    cases: list[Case] = [
        (Row(context, 1),) * rows
        for rows in (1, 2, 4, 8, 12, 16, 24, 32, 48, MAX_ROWS)
        for context in (16, 128, 512)
    ]
    cases += [(Row(1500, 1),) * rows for rows in (1, 4, 16)]
    cases += [ragged(rows, 16, 600, prefill=False) for rows in (8, 32, MAX_ROWS)]
    cases += [(Row(0, n),) for n in (2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)]
    cases += [(Row(context, n),) for n in (8, 64, 256, 512) for context in (128, 512, 1024)]
    cases += [(Row(0, n, ends=False),) for n in (64, 256, 512)]
    shapes = ((5, 8), (5, 32), (8, 32), (8, 64), (16, 16), (32, 8), (64, 4), (64, 8), (128, 4))
    cases += [(Row(0, n),) * rows for n, rows in shapes]
    cases += [ragged(8, 8, 120, prefill=True) for _ in range(2)]
    cases += [
        (Row(200, 1),) * decodes + (Row(0, n),)
        for decodes in (4, 16, 32, 60)
        for n in (32, 128, 448)
    ]
    cases.append((Row(100, 1),) * 32 + (Row(0, 64),) * 4)
    cases.append((Row(200, 1),) * 16 + (Row(256, 256, ends=False),))
    cases.append((Row(200, 1),) * 32 + (Row(512, 480, ends=False),))
    return cases


def quick_design() -> list[Case]:
    """Return every fourth plan, without those that need many KV pages."""
    cases = design()[::QUICK_STRIDE]
    return [case for case in cases if sum(row.context + row.tokens for row in case) <= QUICK_TOKENS]


def features_of_case(case: Case, window: int = 0) -> Features:
    """Return the features of a plan. window: of every layer, in tokens; 0: none."""
    return features_of(
        np.array([row.tokens for row in case]),
        np.array([row.context for row in case]),
        sum(row.ends for row in case),
        window,
    )


def describe(case: Case) -> str:
    """Return a plan as a short text: its first three kinds of rows."""
    kinds = dict.fromkeys(case)
    shown = [f"{case.count(row)} x {row.tokens} on {row.context}" for row in list(kinds)[:3]]
    return ", ".join(shown) + (", ..." if len(kinds) > 3 else "")


def measure(bench: WorkerBench, cases: Sequence[Case], repeats: int) -> Floats:
    """Return the median ms of each case, [cases].

    Each round runs the cases in another order, so that a busy minute of the machine does not fall
    on one kind of step. The first round is not counted.
    """
    bench.fill()
    times: list[list[float]] = [[] for _ in cases]
    order = list(range(len(cases)))
    with tqdm(total=len(cases) * (repeats + 1), unit="step", disable=None) as bar:
        for repeat in range(repeats + 1):
            random.Random(repeat).shuffle(order)
            for index in order:
                ms = bench.measure(cases[index])
                if repeat:
                    times[index].append(ms)
                bar.update()
    return np.array([statistics.median(ms_of_case) for ms_of_case in times])
