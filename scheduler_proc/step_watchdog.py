"""A step that does not end: its worker is stuck, and the launcher is told so."""

import math
from collections.abc import Callable

from quadriga.clock import RunningTime
from quadriga.runtime.child import ControlChannel
from scheduler_proc.pipeline import Pipeline

CHECKS_PER_TIMEOUT = 16
"""A suspension of this process counts as at most one of these parts of the timeout."""


class StepWatchdog:
    """seconds: that a step may take, in which the scheduler itself runs, for what stops both is no
    fault of the worker; 0: any time. clock: the scheduler's."""

    def __init__(
        self,
        seconds: float,
        pipeline: Pipeline,
        control: ControlChannel,
        clock: Callable[[], float],
    ) -> None:
        self._seconds = seconds
        self._pipeline = pipeline
        self._lifeline = control
        self._clock = clock
        self._interval = seconds / CHECKS_PER_TIMEOUT
        self._time = RunningTime(self._interval, clock)
        self._current_step_started_at: float | None = None
        self._ends_at = math.inf
        self.wake_at: float | None = None
        """When `check` wants to be called, by the scheduler's clock; None: with the next step."""

    def check(self) -> None:
        """Tell the launcher, once for each step. Call it after every round."""
        now, since = self._time.now(), self._pipeline.current_step_started_at
        if since != self._current_step_started_at:
            self._current_step_started_at = since
            self._ends_at = now + self._seconds if self._seconds and since is not None else math.inf
        if now >= self._ends_at:
            self._ends_at = math.inf
            why = f"a step has run for {self._seconds:g} s"
            self._lifeline.report("stuck", process="worker_proc", why=why)
        left = self._ends_at - now
        self.wake_at = None if left == math.inf else self._clock() + min(left, self._interval)
