"""A pause: no plan goes out until a new worker is ready, because the one of now is about to end.

It begins with a command of the launcher, which ends the worker once the pause is reported.
"""

import enum
import math

from quadriga.wire.worker import WorkerReady
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.pipeline import Pipeline

# Pages that are not stored within this time after the last step are computed again.
STORE_TIMEOUT_S = 10.0


class _State(enum.Enum):
    """Steps in flight end, then pages are stored, then the pause is complete."""

    NONE = enum.auto()
    AFTER_STEPS = enum.auto()
    STORING = enum.auto()
    COMPLETE = enum.auto()


class Pause:
    """Ends the steps of a worker so that its requests go on where they were with the next one.

    Args:
        lifecycle: the requests.
        pipeline: the steps in flight.

    Attributes:
        ends_at: when `advance` is due even if nothing arrives; infinite: never.
    """

    def __init__(self, lifecycle: RequestLifecycle, pipeline: Pipeline) -> None:
        self._lifecycle = lifecycle
        self._pipeline = pipeline
        self._state = _State.NONE
        self._is_reported = True
        self._began_at = 0
        self._num_at_start = 0  # _num_computed when the worker began
        self.ends_at = math.inf

    @property
    def is_on(self) -> bool:
        """Whether no plan may be sent."""
        return self._state is not _State.NONE

    @property
    def is_complete(self) -> bool:
        """Whether no step is in flight, and all pages are stored that can be."""
        return self._state is _State.COMPLETE

    def begin(self, began_at: int) -> None:
        """Send no further plan until a new worker is ready.

        Once no step is in flight, running requests give their pages to the prefix tree, and the
        worker stores those for which it has a tier.

        Args:
            began_at: a worker is new if it was started later, as in WorkerReady. The one that is
                about to end may still say that it is ready, for example to a new scheduler.
        """
        self._began_at, self._is_reported = began_at, False
        if self._state is _State.NONE:
            self._state = _State.AFTER_STEPS

    def advance(self, now: float) -> None:
        """Take the next steps of a pause that has begun."""
        core = self._lifecycle.core
        if self._state is _State.AFTER_STEPS and self._pipeline.idle:
            plan = core.suspend()
            if self._lifecycle.tracer.live:
                self._lifecycle.tracer.on_plan(plan, now)
            self._lifecycle.fail_all(plan.failed)
            self._state, self.ends_at = _State.STORING, now + STORE_TIMEOUT_S
        if self._state is _State.STORING and not (core.offload.is_storing and now < self.ends_at):
            self._state, self.ends_at = _State.COMPLETE, math.inf

    def on_worker_ready(self, ready: WorkerReady) -> None:
        """Take in that a worker is ready: if it is a new one, the pause is over."""
        self._num_at_start, self.ends_at = self._num_computed, math.inf
        if self.is_on:
            is_new = ready.started_at > self._began_at
            self._state = _State.NONE if is_new else _State.AFTER_STEPS

    def take_report(self) -> int | None:
        """Return, once after each `begin`, `num_new_tokens` of a pause that is complete."""
        if self._is_reported or not self.is_complete:
            return None
        self._is_reported = True
        return self.num_new_tokens

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens that the worker has given, with those of prompts that it has finished.

        Of what it has computed nothing else is left when it ends without tiers.
        """
        return self._num_computed - self._num_at_start

    @property
    def _num_computed(self) -> int:
        stats = self._lifecycle.stats
        return stats.generation_tokens + stats.prompt_tokens
