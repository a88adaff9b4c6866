"""Steps of the real worker in this process: run one at a time, each with its duration.

Needs torch (the extra `serve`), which is imported when a worker is built.
"""

import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from itertools import count
from typing import TYPE_CHECKING

from tqdm import tqdm

from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DECODE, EXTEND, NewSlot, StepPlan, StepResult
from simulator.cost_model import MeasuredOn

if TYPE_CHECKING:
    from worker_proc.step.runner import Runner

MAX_ROWS = 64
MAX_ROW_TOKENS = 640
FILL_CHUNK_TOKENS = 512
# Token ids are drawn below this bound, which every measured model's vocabulary exceeds.
MAX_TOKEN_ID = 20_000


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a step.

    Attributes:
        context: tokens already in the KV cache.
        tokens: tokens that the step computes on top of them.
        ends: the row samples a token.
    """

    context: int
    tokens: int
    ends: bool = True


Case = tuple[Row, ...]


class WorkerBench:
    """A worker in this process that runs one step at a time.

    KV pages are at random places, as they are in a server after a while.
    """

    def __init__(self, runner: "Runner", seed: int = 0) -> None:
        self.runner = runner
        self._page_size = runner.table.page_size
        self._draw = random.Random(seed)
        self._pages = self._draw.sample(range(runner.table.num_pages), runner.table.num_pages)
        self._steps = count()

    def fill(self) -> None:
        """Write to every KV page once: memory that was never written to is read too fast."""
        pages = -(-FILL_CHUNK_TOKENS // self._page_size)
        starts = range(0, self.runner.table.num_pages - pages + 1, pages)
        for first in tqdm(starts, desc="writing to the KV pool", unit="step", disable=None):
            self._run([self._new(0, Row(0, FILL_CHUNK_TOKENS), first)], [(0, FILL_CHUNK_TOKENS)])
            self._run([], [], released=[0])

    def measure(self, case: Case) -> float:
        """Return the ms of a step. Rows of one token get their slots before it, as in a server."""
        with self.prepared(case) as step:
            return step()

    @contextmanager
    def prepared(self, case: Case) -> Iterator[Callable[[], float]]:
        """Yield a function that runs the step of `measure`, once, and returns its ms."""
        slots = self._slots(case)
        self._run([new for new, row in zip(slots, case, strict=True) if row.tokens == 1], [])
        yield lambda: self._run(
            [new for new, row in zip(slots, case, strict=True) if row.tokens > 1],
            [(slot, row.tokens) for slot, row in enumerate(case)],
        )
        self._run([], [], released=range(len(case)))

    @contextmanager
    def decoding_ahead(self, rows: int, context: int, steps: int) -> Iterator[Callable[[], float]]:
        """Yield a function like that of `decoding`, whose steps are launched as a server does.

        Step N + 1 is launched before step N has ended, so a GPU does not wait for the host. The
        function returns the ms of the step before the one that it launches; the first call
        launches two.
        """
        self._run(self._slots([Row(context, 1)] * rows, num_steps=steps), [])
        plan_rows = [(slot, 1) for slot in range(rows)]
        waiting: list[Callable[[], StepResult]] = []

        def step() -> float:
            while len(waiting) < 2:
                waiting.append(self._launch([], plan_rows))
            return ms_of(waiting.pop(0)())

        yield step
        while waiting:
            waiting.pop()()
        self._run([], [], released=range(rows))

    @contextmanager
    def decoding(self, rows: int, context: int, steps: int) -> Iterator[Callable[[], float]]:
        """Yield a function that decodes one more token of each request and returns the step's ms.

        There are `rows` requests of `context` tokens, with pages for `steps` steps.
        """
        self._run(self._slots([Row(context, 1)] * rows, num_steps=steps), [])
        yield lambda: self._run([], [(slot, 1) for slot in range(rows)])
        self._run([], [], released=range(rows))

    def _run(
        self, new: list[NewSlot], rows: list[tuple[int, int]], released: Iterable[int] = ()
    ) -> float:
        return ms_of(self._launch(new, rows, released)())

    def _launch(
        self, new: list[NewSlot], rows: list[tuple[int, int]], released: Iterable[int] = ()
    ) -> Callable[[], StepResult]:
        slots, counts = pack_ids(slot for slot, _ in rows), pack_ids(n for _, n in rows)
        mode = EXTEND if any(n > 1 for _, n in rows) else DECODE
        plan = StepPlan(next(self._steps), mode, slots, counts, new, pack_ids(released))
        from torch import inference_mode

        with inference_mode():
            return self.runner.launch(plan)

    def _slots(self, rows: Sequence[Row], num_steps: int = 0) -> list[NewSlot]:
        """Return a slot for each row, with pages of its own."""
        slots: list[NewSlot] = []
        page = 0
        for slot, row in enumerate(rows):
            slots.append(self._new(slot, row, page, num_steps))
            page += len(slots[-1].pages) // 4
        return slots

    def _new(self, slot: int, row: Row, first_page: int, num_steps: int = 0) -> NewSlot:
        known = row.context + row.tokens + (0 if row.ends else 1)
        pages = self._pages[first_page : first_page - (-(known + num_steps) // self._page_size)]
        ids = pack_ids(self._draw.randrange(3, MAX_TOKEN_ID) for _ in range(known))
        return NewSlot(slot, ids, row.context, pack_ids(pages), 0.0, -1, 1.0, 0)


def ms_of(result: StepResult) -> float:
    """Return the ms that a step took."""
    return 1000 * (result.ended - result.began)


def make_bench(config: ServerConfig, tokens_a_row: int) -> tuple[WorkerBench, MeasuredOn]:
    """Load the model of a configuration into a worker, or raise QuadrigaError."""
    from quadriga.server.models.resolve import resolve_model
    from worker_proc.main import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))  # as in the worker's own process
    from worker_proc.models.decoder import build_model
    from worker_proc.startup.build import make_runner
    from worker_proc.startup.devices import take_cores
    from worker_proc.startup.memory_profile import num_pool_pages

    threads = take_cores(config.worker).threads
    files = resolve_model(config.model, show_progress=True)
    small = config.replace(max_total_tokens=MAX_ROWS * tokens_a_row, max_running_requests=MAX_ROWS)
    runner = make_runner(small, files)
    runner.warm_up()
    table, max_tokens = runner.table, config.scheduler.max_running_requests * files.context_length
    shape = build_model(files.config).attention_shape
    pages = num_pool_pages(config.worker, shape, runner.dtype, table.device, max_tokens)
    return WorkerBench(runner), MeasuredOn(
        model=config.model.shown_name,
        dtype=str(runner.dtype).removeprefix("torch."),
        device=str(table.device),
        threads=threads,
        date=date.today().isoformat(),
        vocab_size=files.vocab_size,
        context_length=files.context_length,
        max_total_tokens=pages * config.worker.page_size,
        window=runner.window,
    )
