"""Who may be to blame when the worker dies, and how it is found out.

Whoever is in a step in flight when the worker dies counts a death, until it has come further than
it was then: what it was computing did no harm. From the second one on it is a suspect. Suspects run
one at a time, nobody else beside them, until they have come that far. The one that is alone in the
steps in flight at its third death is to blame.
"""

from collections.abc import Iterable

from quadriga.errors import RequestFailed
from scheduler_proc.state.request import Request

CRASHES_TO_QUARANTINE = 2
MAX_WORKER_CRASHES = 3
BEYOND = 2
"""So many tokens further than the steps in flight would have brought it."""


def record_worker_crash(in_flight: Iterable[Request]) -> Request | None:
    """Count a death for each of them; who is to blame, if that is certain."""
    there = {request.seq: request for request in in_flight if not request.finished}
    for request in there.values():
        if _came_further(request):
            request.deaths = 0
        request.deaths += 1
        request.cleared_at = max(request.known, len(request.tokens)) + BEYOND
    if len(there) == 1:
        (request,) = there.values()
        if request.deaths >= MAX_WORKER_CRASHES:
            return request
    return None


def is_quarantined(request: Request) -> bool:
    """It must run alone for now."""
    return request.deaths >= CRASHES_TO_QUARANTINE and not _came_further(request)


def blame(request: Request) -> RequestFailed:
    """What to tell the one who is to blame."""
    return RequestFailed(
        f"the worker died {request.deaths} times in a row while it computed this request, the last"
        " time nothing else; the server's log says how. Change the request"
    )


def _came_further(request: Request) -> bool:
    return len(request.tokens) >= request.cleared_at


class Quarantine:
    """The suspects, who wait here and not in the waiting queue."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request.seq in self._requests

    def push(self, request: Request) -> None:
        self._requests[request.seq] = request

    def remove(self, request: Request) -> None:
        """Nothing happens where it is not there."""
        self._requests.pop(request.seq, None)

    @property
    def current(self) -> Request | None:
        """Who runs alone now. Whoever has come far enough goes on like any other."""
        for request in list(self._requests.values()):
            if is_quarantined(request):
                return request
            self.remove(request)
        return None
