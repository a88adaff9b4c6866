"""Find the request that crashes the worker, without ending the others.

A worker crash counts for every request that had a step in flight, until the request has come
further than it was then: what it was computing did no harm. From the second crash on a request is
quarantined: such requests run one at a time, with no other beside them, until they have come that
far. A request that is alone in the steps in flight at its third crash is the poison one.
"""

from collections.abc import Iterable, Iterator

from quadriga.errors import RequestFailed
from scheduler_proc.state.request import Request

CRASHES_TO_QUARANTINE = 2
MAX_WORKER_CRASHES = 3
CLEARANCE_TOKENS = 2  # beyond what the steps in flight would have brought


def record_worker_crash(in_flight: Iterable[Request]) -> Request | None:
    """Count a worker crash for each request in flight. Return the poison one, if certain."""
    requests = {request.seq: request for request in in_flight if not request.finished}
    for request in requests.values():
        if _is_cleared(request):
            request.worker_crashes = 0
        request.worker_crashes += 1
        request.cleared_at = max(request.num_known_tokens, len(request.tokens)) + CLEARANCE_TOKENS
    if len(requests) == 1:
        (request,) = requests.values()
        if request.worker_crashes >= MAX_WORKER_CRASHES:
            return request
    return None


def count_losses(request: Request, num_losses: int) -> None:
    """Count the replicas that were lost with a request as crashes of their workers."""
    request.worker_crashes = num_losses
    request.cleared_at = len(request.tokens) + CLEARANCE_TOKENS


def is_quarantined(request: Request) -> bool:
    """Return whether the request must run alone for now."""
    return request.worker_crashes >= CRASHES_TO_QUARANTINE and not _is_cleared(request)


def poison_error(request: Request) -> RequestFailed:
    """Return the error of the poison request."""
    return RequestFailed(
        f"the worker died {request.worker_crashes} times in a row while it computed this request,"
        " the last time nothing else; the server's log says how. Change the request"
    )


def _is_cleared(request: Request) -> bool:
    return len(request.tokens) >= request.cleared_at


class Quarantine:
    """The quarantined requests, which wait here and not in the waiting queue."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def push(self, request: Request) -> None:
        """Add a request."""
        self._requests[request.seq] = request

    def remove(self, request: Request) -> None:
        """Remove a request, if it is there."""
        self._requests.pop(request.seq, None)

    @property
    def current(self) -> Request | None:
        """The request that runs alone now. One that is cleared leaves the quarantine."""
        for request in list(self._requests.values()):
            if is_quarantined(request):
                return request
            self.remove(request)
        return None
