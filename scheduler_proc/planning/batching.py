"""When requests leave the running batch, and when others enter it (--batching)."""

from typing import Protocol

from scheduler_proc.planning.admission import CoreState
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request


class Batching(Protocol):
    """A rule of batching. It alone takes requests out of the running batch when they end."""

    def leave(self, request: Request) -> None:
        """Take a decoding request, which needs no further step, out of the running batch."""

    def remove(self, request: Request) -> None:
        """Remove a request that ends, wherever it is. Steps in flight keep its pages."""

    def release(self, request: Request) -> None:
        """Release slot and pages of a request that has ended and has no step in flight."""

    def num_admissible(self, limit: int) -> int:
        """Return how many requests may enter now, at most `limit`."""

    def add_rows(self, batch: ScheduleBatch) -> None:
        """Add rows of requests that have ended to a step whose decode rows are complete."""

    def end_batch(self) -> None:
        """Release all slots and pages of requests that have ended.

        Nothing else runs, or a request must run alone. What has a step in flight is released when
        the step is answered.
        """

    def give_pages(self) -> bool:
        """Release pages of requests that have ended. Return whether there were any."""

    @property
    def holds_slots(self) -> bool:
        """Whether requests that have ended hold slots, beyond their last step in flight."""


class ContinuousBatching:
    """Continuous batching: a request leaves with its last step, and others enter with any step.

    Args:
        state: the requests and pages.
    """

    holds_slots = False

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def leave(self, request: Request) -> None:
        """Take a decoding request out of the running batch."""
        self._state.running.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ends, and release slot and pages unless a step is in flight."""
        self._state.remove(request)
        if request.in_flight == 0:
            self.release(request)

    def release(self, request: Request) -> None:
        """Release slot and pages of a request that has ended."""
        self._state.admission.release(request)

    def num_admissible(self, limit: int) -> int:
        """Return `limit`."""
        return limit

    def add_rows(self, batch: ScheduleBatch) -> None:
        """Add no row."""

    def end_batch(self) -> None:
        """Do nothing."""

    def give_pages(self) -> bool:
        """Return False."""
        return False
