"""A step that does not end: its worker is stuck, and the launcher is told so."""

from quadriga.process import Lifeline
from scheduler_proc.pipeline import Pipeline


class StepDeadline:
    """seconds: that a step may take; 0: any time."""

    def __init__(self, seconds: float, pipeline: Pipeline, lifeline: Lifeline) -> None:
        self._seconds = seconds
        self._pipeline = pipeline
        self._lifeline = lifeline
        self._told: float | None = None

    @property
    def wake_at(self) -> float | None:
        """When `check` wants to be called, in Unix seconds."""
        since = self._pipeline.step_since
        if not self._seconds or since is None or since == self._told:
            return None
        return since + self._seconds

    def check(self, now: float) -> None:
        """Tell the launcher, once for each step. now: Unix seconds."""
        moment = self.wake_at
        if moment is not None and now >= moment:
            self._told = self._pipeline.step_since
            why = f"a step has run for {self._seconds:g} s"
            self._lifeline.report("stuck", process="worker_proc", why=why)
