"""The watchdog of the worker: it reports a step that takes too long to the launcher."""

import math
from collections.abc import Callable

from quadriga.clock import RunningTime
from quadriga.runtime.control_channel import ControlChannel
from scheduler_proc.pipeline import Pipeline

CHECKS_PER_TIMEOUT = 16  # a suspension of this process counts as at most one of these parts


class StepWatchdog:
    """Report a worker whose step has run longer than `timeout_s`.

    Only time in which this process runs counts: a suspension of both is no fault of the worker.

    Attributes:
        wake_at: when `check` must be called, by the clock; None until the next step.
    """

    def __init__(
        self,
        timeout_s: float,
        pipeline: Pipeline,
        control: ControlChannel,
        clock: Callable[[], float],
    ) -> None:
        """Initialize. timeout_s: 0 for none; clock: the scheduler's."""
        self.wake_at: float | None = None
        self._timeout_s = timeout_s
        self._pipeline = pipeline
        self._control = control
        self._clock = clock
        self._interval = timeout_s / CHECKS_PER_TIMEOUT
        self._time = RunningTime(self._interval, clock)
        self._step_started_at: float | None = None
        self._ends_at = math.inf

    def check(self) -> None:
        """Report the current step if it is stuck, once. Call this after every scheduler step."""
        now, started_at = self._time.now(), self._pipeline.current_step_started_at
        if started_at != self._step_started_at:
            self._step_started_at = started_at
            has_limit = self._timeout_s and started_at is not None
            self._ends_at = now + self._timeout_s if has_limit else math.inf
        if now >= self._ends_at:
            self._ends_at = math.inf
            why = f"a step has run for {self._timeout_s:g} s"
            self._control.report("stuck", process="worker_proc", why=why)
        left = self._ends_at - now
        self.wake_at = None if left == math.inf else self._clock() + min(left, self._interval)
