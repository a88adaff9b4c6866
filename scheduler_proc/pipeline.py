"""The steps in flight, and when to plan the next one: as late as the worker allows.

A plan that is made later knows of more requests: one that arrives while a step runs is then in the
very next step. A plan that comes too late leaves the worker idle for one round trip (about half a
millisecond) and no longer, because a result is always answered at once.
"""

import math
from collections import deque

import msgspec

from quadriga.wire.sockets import Sender
from quadriga.wire.worker import LoadPages, ResultMessage, StepResult, StorePages
from scheduler_proc.planning.step_cost import StepCosts
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request

MAX_OUTSTANDING = 2  # the running step, and one that the worker begins without waiting
# A plan is sent LEAD_S + LEAD_FRACTION * (duration of the step) before the predicted end: time to
# wake up, to plan, and for the message to arrive.
LEAD_S = 0.002
LEAD_FRACTION = 0.05
DELAY_FRACTION = 0.2  # of the shortest kind of step
MAX_DELAY_S = 0.002  # after each request
MAX_TOTAL_DELAY_S = 5 * MAX_DELAY_S


class Pipeline:
    """Send plans to the worker, at most two ahead of its results, and what belongs to them."""

    def __init__(self, worker: Sender, plan_at_once: bool, costs: StepCosts) -> None:
        """Initialize.

        Args:
            worker: the link to the worker.
            plan_at_once: plan as soon as fewer than two steps are outstanding, without delays.
            costs: how long steps take.
        """
        self._worker = worker
        self._plan_at_once = plan_at_once
        self._costs = costs
        self._outstanding: deque[ScheduleBatch] = deque()
        self._batch_delay = BatchDelay()
        self._next_step = 0
        self._session = 0
        self._worker_ready_at = 0.0

    def reset(self, session: int, now: float) -> list[Request]:
        """Start with a new worker. Return the requests in steps that the one before had not run."""
        lost = [request for batch in self._outstanding for request in batch.requests]
        self._outstanding.clear()
        self._session, self._worker_ready_at = session, now
        return lost

    def is_stale(self, result: ResultMessage) -> bool:
        """Return whether the result belongs to an earlier worker session."""
        return result.session != self._session

    @property
    def idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._outstanding

    @property
    def next_plan_at(self) -> float:
        """Time from which on another plan is wanted; infinite with two steps in flight."""
        if not self._outstanding:
            return self._batch_delay.ends_at
        if len(self._outstanding) >= MAX_OUTSTANDING:
            return math.inf
        if self._plan_at_once:
            return 0.0
        running = self._outstanding[0]
        seconds = self._costs.earliest_s(running)
        began = max(running.planned_at, self._costs.last_ended)
        return began + seconds - LEAD_S - LEAD_FRACTION * seconds

    def start_batch_delay(self, now: float) -> None:
        """Delay the next plan of an idle worker, because a request arrived."""
        if self.idle and not self._plan_at_once:
            # Short compared with the step that a late request would wait for.
            delay_s = min(MAX_DELAY_S, DELAY_FRACTION * self._costs.shortest_s)
            self._batch_delay.on_arrival(now, delay_s)

    def in_batch_delay(self, now: float) -> bool:
        """Return whether an idle worker waits for requests that arrive together."""
        return now < self._batch_delay.ends_at

    def dispatch(self, batch: ScheduleBatch, released: list[int], now: float) -> None:
        """Send a plan to the worker, which first forgets the slots `released`."""
        batch.step, self._next_step = self._next_step, self._next_step + 1
        batch.planned_at = now
        self._worker.send(batch.to_plan(released, self._session))
        self._outstanding.append(batch)
        self._batch_delay.reset()

    def send_transfer(self, message: StorePages | LoadPages) -> None:
        """Let the worker copy pages; a worker that takes its place drops the message."""
        self._worker.send(msgspec.structs.replace(message, session=self._session))

    def complete(self, result: StepResult) -> ScheduleBatch:
        """Return the step of this result. Results come in the order of the plans."""
        batch = self._outstanding.popleft()
        assert batch.step == result.step, f"step {result.step} came, {batch.step} was next"
        return batch

    @property
    def current_step_started_at(self) -> float | None:
        """Time at which the worker's current step began; None without one."""
        if not self._outstanding:
            return None
        planned_at, last_ended = self._outstanding[0].planned_at, self._costs.last_ended
        return max(planned_at, last_ended, self._worker_ready_at)


class BatchDelay:
    """Delay the first plan of an idle worker, so that requests arriving together share a step.

    Attributes:
        ends_at: time from which on the plan is sent.
    """

    def __init__(self) -> None:
        self.ends_at = self._latest_end = 0.0

    def on_arrival(self, now: float, delay_s: float) -> None:
        """Restart the delay: a request arrived."""
        if self._latest_end + MAX_TOTAL_DELAY_S < now:  # the requests of then ended without a step
            self._latest_end = now + MAX_TOTAL_DELAY_S
        self.ends_at = min(now + delay_s, self._latest_end)

    def reset(self) -> None:
        """End the delay: a step was planned."""
        self.ends_at = self._latest_end = 0.0
