"""Steps of the real worker, in this process: which plans are run, and how long each takes."""

import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bench.simulate.cost_model import Features, MeasuredOn, features_of
from quadriga.config.server_config import ServerConfig
from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.worker import DECODE, EXTEND, NewSlot, StepPlan

if TYPE_CHECKING:
    from worker_proc.runner import Runner

Floats = npt.NDArray[np.float64]
MAX_ROWS = 64
MAX_TOKENS_A_ROW = 640
"""The pool of a measurement holds so many tokens for each of so many rows."""
FILL_CHUNK = 512
LAST_ID = 20_000
"""Token ids are drawn below it: every model of use has as many."""


@dataclass(frozen=True, slots=True)
class Row:
    """tokens to compute on top of `context` earlier ones. ends: the row samples a token."""

    context: int
    tokens: int
    ends: bool = True


Case = tuple[Row, ...]


def design(seed: int = 0) -> list[Case]:
    """Plans that spread over what a server runs: decodes at several widths and contexts, prefills
    fresh and on top of a context, chunks that do not end, and mixtures."""
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


def features_of_case(case: Case) -> Features:
    return features_of(
        np.array([row.tokens for row in case]),
        np.array([row.context for row in case]),
        sum(row.ends for row in case),
    )


def describe(case: Case) -> str:
    """For a line of a report."""
    kinds = dict.fromkeys(case)
    shown = [f"{case.count(row)} x {row.tokens} on {row.context}" for row in list(kinds)[:3]]
    return ", ".join(shown) + (", ..." if len(kinds) > 3 else "")


class Bench:
    """A worker in this process, and the plans that make it run one step at a time. Pages are at
    random places, as those of a server are before long."""

    def __init__(self, runner: "Runner", seed: int = 0) -> None:
        self.runner = runner
        self._page_size = runner.table.page_size
        self._draw = random.Random(seed)
        self._pages = self._draw.sample(range(runner.table.num_pages), runner.table.num_pages)
        self._steps = count()

    def fill(self) -> None:
        """Write to every page once: memory that was never written to is read too fast."""
        pages = -(-FILL_CHUNK // self._page_size)
        starts = range(0, self.runner.table.num_pages - pages + 1, pages)
        for first in tqdm(starts, desc="writing to the KV pool", unit="step", disable=None):
            self._run([self._new(0, Row(0, FILL_CHUNK), first)], [(0, FILL_CHUNK)])
            self._run([], [], released=[0])

    def measure(self, case: Case) -> float:
        """ms of the step. Rows of one token are seated before it, as those of a server are."""
        seated: list[NewSlot] = []
        new: list[NewSlot] = []
        page = 0
        for slot, row in enumerate(case):
            one = self._new(slot, row, page)
            page += len(one.pages) // 4
            (new if row.tokens > 1 else seated).append(one)
        self._run(seated, [])
        ms = self._run(new, [(slot, row.tokens) for slot, row in enumerate(case)])
        self._run([], [], released=range(len(case)))
        return ms

    @contextmanager
    def decoding(self, rows: int, context: int, steps: int) -> Iterator[Callable[[], float]]:
        """Requests in their slots with so much context, room for so many steps, and what decodes
        one more token of each: the ms of its step."""
        seated: list[NewSlot] = []
        page = 0
        for slot in range(rows):
            seated.append(self._new(slot, Row(context, 1), page, room=steps))
            page += len(seated[-1].pages) // 4
        self._run(seated, [])
        yield lambda: self._run([], [(slot, 1) for slot in range(rows)])
        self._run([], [], released=range(rows))

    def _run(
        self, new: list[NewSlot], rows: list[tuple[int, int]], released: Iterable[int] = ()
    ) -> float:
        slots, counts = pack_ids(slot for slot, _ in rows), pack_ids(n for _, n in rows)
        mode = EXTEND if any(n > 1 for _, n in rows) else DECODE
        plan = StepPlan(next(self._steps), mode, slots, counts, new, pack_ids(released))
        result = self.runner.run(plan)
        return 1000 * (result.ended - result.began)

    def _new(self, slot: int, row: Row, first_page: int, room: int = 0) -> NewSlot:
        known = row.context + row.tokens + (0 if row.ends else 1)
        pages = self._pages[first_page : first_page - (-(known + room) // self._page_size)]
        ids = pack_ids(self._draw.randrange(3, LAST_ID) for _ in range(known))
        return NewSlot(slot, ids, row.context, pack_ids(pages), 0.0, -1, 1.0, 0)


def measure(bench: Bench, cases: Sequence[Case], repeats: int) -> Floats:
    """[cases] median ms. Every round takes the cases in another order, and the first is not
    counted: what disturbs the machine for a while shall not fall on one kind of step."""
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
    return np.array([statistics.median(one) for one in times])


def make_bench(
    config: ServerConfig, tokens_a_row: int = MAX_TOKENS_A_ROW
) -> tuple[Bench, MeasuredOn]:
    """Load the model of these flags. QuadrigaError where that does not work."""
    from quadriga.model_files.resolve import resolve_model
    from worker_proc.main import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # as in the worker's own process
    from worker_proc.models.registry import build_model
    from worker_proc.startup.build import make_runner
    from worker_proc.startup.memory_profile import num_pool_pages
    from worker_proc.system.devices import take_cores

    threads = take_cores(config.worker).threads
    files = resolve_model(config.model, show_progress=True)
    small = config.replace(max_total_tokens=MAX_ROWS * tokens_a_row, max_running_requests=MAX_ROWS)
    runner = make_runner(small, files)
    runner.warm_up()
    table, most = runner.table, config.scheduler.max_running_requests * files.context_length
    shape = build_model(files.config).attention_shape
    pages = num_pool_pages(config.worker, shape, runner.dtype, table.device, most)
    return Bench(runner), MeasuredOn(
        model=config.model.shown_name,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(table.device),
        threads=threads,
        date=date.today().isoformat(),
        vocab_size=files.vocab_size,
        context_length=files.context_length,
        max_total_tokens=pages * config.worker.page_size,
    )
