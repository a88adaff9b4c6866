"""When requests leave the running batch, and when others enter it (--batching).

With continuous batching a request leaves with its last step, and others enter with any step. With
static batching a batch runs to its end before the next one is admitted: a request that has ended
keeps slot, pages and a row in every step until the last one of its batch has ended, as in static
servers; what its row samples is dropped. Such requests are the padding of the batch.
"""

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning.admission import CoreState
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request


class ContinuousBatching:
    """Continuous batching: there is no padding. Another rule is a subclass.

    Args:
        state: the requests and pages.
    """

    def __init__(self, state: CoreState) -> None:
        self._state = state

    # --- requests leave ---------------------------------------------------------------------------

    def stop(self, request: Request) -> None:
        """Take a decoding request, which needs no further step, out of the running batch."""
        self._state.running.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request that ends, wherever it stands. Steps in flight keep its pages."""
        state = self._state
        state.waiting.remove(request)
        state.quarantine.remove(request)
        if request in state.running:
            self.stop(request)
        state.running.remove(request)
        if request.in_flight == 0:
            self.release(request)

    def release(self, request: Request) -> None:
        """Release slot and pages of a request that has ended and has no step in flight."""
        self._state.admission.release(request)

    # --- requests enter ---------------------------------------------------------------------------

    def num_admissible(self, limit: int) -> int:
        """Return how many requests may enter now, at most `limit`."""
        return limit

    # --- padding ----------------------------------------------------------------------------------

    @property
    def has_padding(self) -> bool:
        """Whether requests that have ended pad the batch."""
        return False

    def padding_rows(self) -> list[Request]:
        """Return the requests that can pad the next step."""
        return []

    def pad(self, batch: ScheduleBatch, padding: list[Request]) -> None:
        """Add rows of padding to a step that decodes.

        Args:
            batch: the step; its decode rows are complete.
            padding: what `padding_rows` returned before they were added.
        """

    def release_padding(self) -> None:
        """Release slots and pages of the padding, at the latest when its steps are answered."""


class StaticBatching(ContinuousBatching):
    """Static batching: a batch is closed by its first decode step, and open when all have left."""

    def __init__(self, state: CoreState) -> None:
        super().__init__(state)
        self._padding: dict[int, Request] = {}
        self._is_open = True

    def stop(self, request: Request) -> None:
        """Make a request that needs no further step padding."""
        super().stop(request)
        self._padding[request.seq] = request

    def release(self, request: Request) -> None:
        """Release slot and pages of a request that has ended, unless it is padding."""
        if request.seq not in self._padding:
            super().release(request)

    def num_admissible(self, limit: int) -> int:
        """Return how many requests may enter now: none until the whole batch has left."""
        num_holders = len(self._state.admission.holders)
        if num_holders == 0:
            self._is_open = True
        return min(limit, self._state.running.width - num_holders) if self._is_open else 0

    @property
    def has_padding(self) -> bool:
        """Whether requests that have ended pad the batch."""
        return len(self._padding) > 0

    def padding_rows(self) -> list[Request]:
        """Return the requests that can pad the next step.

        None grows longer than the longest of its batch may become, which the context holds.
        """
        if not self._padding:
            return []
        holders = self._state.admission.holders.values()
        longest = max(request.max_total_tokens for request in holders)
        return [r for r in self._padding.values() if r.num_known_tokens < longest]

    def pad(self, batch: ScheduleBatch, padding: list[Request]) -> None:
        """Add the rows that still pad. They take no page from others: without one a row is out."""
        self._is_open = False
        kv, rows = self._state.kv, []
        for request in padding:
            if request.seq not in self._padding:
                continue
            if request.num_computed_tokens == request.page_capacity:
                if kv.num_available == 0:
                    continue
                batch.grown += (request.slot, kv.append_page(request))
            rows.append(request)
        batch.add_decodes(rows)

    def release_padding(self) -> None:
        """Release slots and pages of the padding, at the latest when its steps are answered."""
        requests, self._padding = self._padding, {}
        for request in requests.values():
            self._state.admission.pending_release.add(request.seq)
            if request.in_flight == 0:
                self._state.admission.release(request)


def make_batching(args: SchedulerArgs, state: CoreState) -> ContinuousBatching:
    """Return the rule of --batching."""
    return (StaticBatching if args.batching == "static" else ContinuousBatching)(state)
