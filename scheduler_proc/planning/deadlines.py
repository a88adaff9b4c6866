"""Until when requests must have been admitted, and until when they must have ended."""

from collections.abc import Iterator

from sortedcontainers import SortedDict

from quadriga.errors import DeadlineExceeded
from scheduler_proc.state.request import Request


class Deadlines:
    """Two kinds of moments, in one order: (time, seq, kind) -> request."""

    def __init__(self) -> None:
        self._moments: SortedDict = SortedDict()

    def watch(self, request: Request) -> None:
        """A request that arrived."""
        for kind, time in _moments_of(request):
            self._moments[time, request.seq, kind] = request

    def admitted(self, request: Request) -> None:
        """It has not waited too long, and if it has to wait again, that is not its fault."""
        if request.queue_deadline is not None:
            self._moments.pop((request.queue_deadline, request.seq, "queue"), None)

    def forget(self, request: Request) -> None:
        """It has ended."""
        for kind, time in _moments_of(request):
            self._moments.pop((time, request.seq, kind), None)

    @property
    def next(self) -> float | None:
        """When the first one passes."""
        return self._moments.peekitem(0)[0][0] if self._moments else None

    def expired(self, now: float) -> Iterator[tuple[Request, DeadlineExceeded]]:
        """Requests whose moment has passed, with what to tell them."""
        while self._moments and self._moments.peekitem(0)[0][0] <= now:
            (time, _seq, kind), request = self._moments.popitem(0)
            allowed = f"{time - request.received:.3g} s"
            if kind == "queue":
                message = (
                    f"the request was not admitted within {allowed} (queue_timeout); the server is"
                    " busy: try again later, or allow more"
                )
            else:
                message = (
                    f"the request did not finish within {allowed} (timeout), after"
                    f" {request.num_generated} tokens: ask for fewer, or allow more"
                )
            yield request, DeadlineExceeded(message)


def _moments_of(request: Request) -> Iterator[tuple[str, float]]:
    if request.queue_deadline is not None:
        yield "queue", request.queue_deadline
    if request.deadline is not None:
        yield "total", request.deadline
