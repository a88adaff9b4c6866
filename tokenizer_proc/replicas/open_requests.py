"""The requests that the scheduler has: OpenRequests owns each Submit from sending to its last end.

They are kept as they were sent, because a scheduler that dies loses what it had received and not
yet journaled: whatever was on its way, and whatever waited in its socket, which may be everything
that came while it stood still. The next scheduler is sent all of them again.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import msgspec

from quadriga.wire.sockets import SchedulerLink
from quadriga.wire.to_scheduler import CLIENT_LOST, AbortRequest, Submit

# Lost clients and their requests are remembered up to these bounds, so that the next scheduler ends
# what it has of them, and so that a request among them may come back past the limits for new ones.
MAX_LOST_CLIENTS = 1024
MAX_LOST_REQUESTS = 65536

RequestT = TypeVar("RequestT")


class ClientRequests(Generic[RequestT]):
    """Requests by client and request id."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, dict[str, RequestT]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __iter__(self) -> Iterator[RequestT]:
        return chain.from_iterable(requests.values() for requests in self._by_client.values())

    def of_client(self, client: bytes) -> dict[str, RequestT]:
        """Return the requests of a client by id; only to be read."""
        return self._by_client.get(client, {})

    def find(self, client: bytes, request_id: str) -> RequestT | None:
        """Return a request, or None."""
        return self.of_client(client).get(request_id)

    def put(self, client: bytes, request_id: str, request: RequestT) -> None:
        """Add a request, in place of the one of the same id if there is one."""
        self._by_client.setdefault(client, {})[request_id] = request

    def remove(self, client: bytes, request_id: str) -> None:
        """Remove a request, which must be present."""
        requests = self._by_client[client]
        del requests[request_id]
        if not requests:
            del self._by_client[client]

    def remove_client(self, client: bytes) -> dict[str, RequestT]:
        """Remove and return all requests of a client, by id."""
        return self._by_client.pop(client, {})


@dataclass(slots=True)
class OpenRequest:
    """A request that was submitted.

    Attributes:
        aborted_by: as in AbortRequest; "" if the request was not aborted.
        keep_s: as in Generate.
    """

    submit: Submit
    num_open_choices: int
    aborted_by: str = ""
    keep_s: float | None = None


class LostRequests(NamedTuple):
    """The requests of a client that is gone: those that were aborted, and those that go on."""

    ended: list[OpenRequest]
    kept: list[OpenRequest]


class OpenRequests:
    """Send requests and aborts to the scheduler, and keep each request until its last end."""

    def __init__(self, scheduler: SchedulerLink) -> None:
        self._scheduler = scheduler
        self._open = ClientRequests[OpenRequest]()
        self._lost: OrderedDict[bytes, set[str]] = OrderedDict()
        self._num_lost = 0

    def __len__(self) -> int:
        return len(self._open)

    def num_of_client(self, client: bytes) -> int:
        """Return the number of open requests of a client."""
        return len(self._open.of_client(client))

    def was_accepted(self, client: bytes, request_id: str) -> bool:
        """Return whether a request is open, or was when its client's connection was lost."""
        is_lost = request_id in self._lost.get(client, ())
        return is_lost or self._open.find(client, request_id) is not None

    def is_open(self, client: bytes, request_id: str) -> bool:
        """Return whether a request is open."""
        return self._open.find(client, request_id) is not None

    def submit(self, message: Submit, aborted_by: str, keep_s: float | None = None) -> bool:
        """Send a request to the scheduler, followed by its abort where `aborted_by` is not empty.

        Return whether it was not open before.

        An open request is sent once more only if its client has resent it
        (`message.client_retry`); all of its choices will then end once more.
        """
        client, request_id = message.client, message.request_id
        is_new = self._open.find(client, request_id) is None
        if not message.client_retry and not is_new:
            return False
        request = OpenRequest(message, message.params.n, aborted_by, keep_s)
        self._open.put(client, request_id, request)
        self._scheduler.send(message)
        if aborted_by:
            self._scheduler.send(AbortRequest(client, request_id, aborted_by))
        return is_new

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """Abort one request of a client, or with an empty id all of them."""
        for name, request in self._open.of_client(client).items():
            if request_id in ("", name):
                request.aborted_by = by
        self._scheduler.send(AbortRequest(client, request_id, by))

    def count_end(self, client: bytes, request_id: str) -> OpenRequest | None:
        """Count one choice of a request as ended. Return the request; None for an unknown one."""
        request = self._open.find(client, request_id)
        if request is not None:
            request.num_open_choices -= 1
            if request.num_open_choices <= 0:
                self._open.remove(client, request_id)
        return request

    def lose_client(self, client: bytes) -> "LostRequests":
        """Abort the requests of a client whose connection is lost, and remember their ids.

        Those with `keep_s` go on.
        """
        kept = [request for request in self.of_client(client) if request.keep_s is not None]
        if kept:
            ended = [request for request in self.of_client(client) if request.keep_s is None]
            for request in ended:
                self.end(request, CLIENT_LOST)
        else:
            self.abort(client, "", CLIENT_LOST)
            ended = list(self._open.remove_client(client).values())
        self._remember_lost(client, {request.submit.request_id for request in ended})
        return LostRequests(ended, kept)

    def of_client(self, client: bytes) -> list[OpenRequest]:
        """Return the open requests of a client."""
        return list(self._open.of_client(client).values())

    def end(self, request: OpenRequest, by: str) -> bool:
        """Abort and forget a request. Return False if it has ended, or its client has resent it."""
        client, request_id = request.submit.client, request.submit.request_id
        if self._open.find(client, request_id) is not request:
            return False
        self.abort(client, request_id, by)
        self._open.remove(client, request_id)
        return True

    def _remember_lost(self, client: bytes, request_ids: set[str]) -> None:
        if not request_ids:
            return
        self._forget_lost(client)
        self._lost[client] = request_ids
        self._num_lost += len(request_ids)
        while len(self._lost) > MAX_LOST_CLIENTS or self._num_lost > MAX_LOST_REQUESTS:
            self._forget_lost(next(iter(self._lost)))

    def _forget_lost(self, client: bytes) -> None:
        self._num_lost -= len(self._lost.pop(client, ()))

    def resend_all(self) -> None:
        """Send everything to a new scheduler, which ignores what its journal holds already."""
        for client, request_ids in self._lost.items():
            is_open = self._open.of_client(client)
            for request_id in request_ids - is_open.keys() if is_open else [""]:
                self._scheduler.send(AbortRequest(client, request_id, CLIENT_LOST))
        for request in self._open:
            submit = request.submit
            self._scheduler.send(msgspec.structs.replace(submit, frontend_retry=True))
            if request.aborted_by:
                abort = AbortRequest(submit.client, submit.request_id, request.aborted_by)
                self._scheduler.send(abort)
