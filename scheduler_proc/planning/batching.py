"""When requests leave the running batch, and when others enter it (--batching)."""

from typing import Protocol

from quadriga.server.config.engine_args import SchedulerArgs
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


# Static batching, for comparison: a batch runs to its end before the next one is admitted.
#
# A request that has ended keeps slot, pages and a row in every step until the last one of its batch
# has ended, as in static servers; what its row samples is dropped. Such requests are the padding of
# the batch.


class StaticBatching:
    """A batch is closed by its first decode step, and open when all requests have left.

    The methods are those of the protocol `Batching`.

    Args:
        state: the requests and pages.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._padding: dict[int, Request] = {}
        self._is_open = True

    def leave(self, request: Request) -> None:
        """Make a request that needs no further step padding."""
        self._state.running.remove(request)
        self._padding[request.seq] = request

    def remove(self, request: Request) -> None:
        """Remove a request that ends; one that decodes becomes padding."""
        if request in self._state.running:
            self.leave(request)
        self._state.remove(request)
        if request.in_flight == 0:
            self.release(request)

    def release(self, request: Request) -> None:
        """Release slot and pages of a request that has ended, unless it is padding."""
        if request.seq not in self._padding:
            self._state.admission.release(request)

    def num_admissible(self, limit: int) -> int:
        """Return how many requests may enter now: none until the whole batch has left."""
        num_holders = len(self._state.admission.holders)
        if num_holders == 0:
            self._is_open = True
        return min(limit, self._state.running.width - num_holders) if self._is_open else 0

    def add_rows(self, batch: ScheduleBatch) -> None:
        """Add rows of padding. They take no page from others: without one a row is left out.

        None grows longer than the longest of its batch may become, which the context holds.
        """
        self._is_open = False
        if not self._padding:
            return
        kv, rows = self._state.kv, []
        holders = self._state.admission.holders.values()
        longest = max(request.max_total_tokens for request in holders)
        for request in self._padding.values():
            if request.num_known_tokens >= longest:
                continue
            if request.num_computed_tokens == request.page_capacity:
                if kv.num_available == 0:
                    continue
                batch.grown += (request.slot, kv.append_page(request))
            rows.append(request)
        batch.add_decodes(rows)

    def end_batch(self) -> None:
        """Release slots and pages of the padding, at the latest when its steps are answered."""
        requests, self._padding = self._padding, {}
        for request in requests.values():
            self._state.admission.pending_release.add(request.seq)
            if request.in_flight == 0:
                self._state.admission.release(request)

    def give_pages(self) -> bool:
        """Release the padding. Return whether there was any."""
        has_padding = self.holds_slots
        self.end_batch()
        return has_padding

    @property
    def holds_slots(self) -> bool:
        """Whether requests that have ended pad the batch."""
        return len(self._padding) > 0


def make_batching(args: SchedulerArgs, state: CoreState) -> Batching:
    """Return the rule of --batching."""
    return (StaticBatching if args.batching == "static" else ContinuousBatching)(state)
