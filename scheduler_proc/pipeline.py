"""The steps under way: plans that were sent to the worker and that it has not answered yet."""

import math
from collections import deque

from quadriga.wire.messages.worker import ResultMessage, StepResult
from scheduler_proc.durability.step_output import Sender
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request
from scheduler_proc.step_timing import BatchDelay, StepTimePredictor

MAX_OUTSTANDING = 2
"""The step that runs, and one that the worker begins without waiting for anybody."""


class Pipeline:
    """Keeps the worker busy, and each plan as late as the running step's end allows.

    plan_at_once: plans are not late.
    """

    def __init__(self, worker: Sender, plan_at_once: bool) -> None:
        self._worker = worker
        self._plan_at_once = plan_at_once
        self._outstanding: deque[ScheduleBatch] = deque()
        self._pace = StepTimePredictor()
        self._company = BatchDelay()
        self._next_step = 0
        self._session = 0
        self._worker_since = 0.0

    def begin(self, session: int, now: float) -> list[Request]:
        """A worker is there, the first one or another. Who was in steps that it knows nothing
        of."""
        lost = [request for batch in self._outstanding for request in batch.requests]
        self._outstanding.clear()
        self._session, self._worker_since = session, now
        return lost

    def is_of_the_dead(self, result: ResultMessage) -> bool:
        """The last words of a worker that died."""
        return result.session != self._session

    @property
    def idle(self) -> bool:
        """The worker has nothing to do."""
        return not self._outstanding

    @property
    def due(self) -> float:
        """The clock's time from which another plan is wanted."""
        if not self._outstanding:
            return self._company.until
        if len(self._outstanding) >= MAX_OUTSTANDING:
            return math.inf
        return 0.0 if self._plan_at_once else self._pace.due(self._outstanding[0])

    def start_batch_delay(self, now: float) -> None:
        """Somebody has come to an idle worker, and others may come with them."""
        if not self._plan_at_once:
            self._company.came(now, self._pace.patience)

    def in_batch_delay(self, now: float) -> bool:
        """An idle worker has no step yet because others may come."""
        return now < self._company.until

    def run(self, batch: ScheduleBatch, released: list[int], now: float) -> None:
        """Send a plan. released: slots that the worker may forget first."""
        batch.step, self._next_step = self._next_step, self._next_step + 1
        batch.planned_at = now
        self._worker.send(batch.to_plan(released, self._session))
        self._outstanding.append(batch)
        self._company.left()

    def answered(self, result: StepResult) -> ScheduleBatch:
        """The step whose result this is: results come in the order of the plans."""
        batch = self._outstanding.popleft()
        assert batch.step == result.step, f"step {result.step} came, {batch.step} was next"
        self._pace.learn(batch, result)
        return batch

    @property
    def step_since(self) -> float | None:
        """Since when the step has run that the worker is at; None where it has none."""
        if not self._outstanding:
            return None
        return max(self._outstanding[0].planned_at, self._pace.last_ended, self._worker_since)
