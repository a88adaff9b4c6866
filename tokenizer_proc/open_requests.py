"""The requests that are open: from when the scheduler is sent them until their last choice ends.

They are kept as they were sent, to be sent again to another scheduler: one that dies takes along
what it had received and not yet written down, which is what is on its way to it and what waits in
its socket. It may be all that came while it stood still.
"""

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from quadriga.wire.messages.to_scheduler import CLIENT_LOST, AbortRequest, Submit
from quadriga.wire.sockets import Outbox

MAX_LOST_CLIENTS = 1024
MAX_LOST_REQUESTS = 65536
"""Clients whose connection was lost, and their requests, that are remembered: the next scheduler
ends what it has of them, and a request among them may be sent again past the limits for new ones.
"""


@dataclass(slots=True)
class OpenRequest:
    """An open request.

    Attributes:
        num_choices: choices that have not ended.
        aborted_by: as in AbortRequest, "" if it was not.
    """

    submit: Submit
    num_choices: int
    aborted_by: str = ""


class OpenRequests:
    """Count what is open, send it and its aborts to the scheduler, and keep it."""

    def __init__(self, scheduler: Outbox) -> None:
        self._scheduler = scheduler
        self._open: dict[bytes, dict[str, OpenRequest]] = {}
        self._lost: OrderedDict[bytes, set[str]] = OrderedDict()
        self._num_lost = 0

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def num_of(self, client: bytes) -> int:
        """Return how many open requests a client has."""
        return len(self._open.get(client, ()))

    def was_accepted(self, client: bytes, request_id: str) -> bool:
        """Return whether a request is open, or was when its client's connection was lost."""
        return request_id in self._open.get(client, ()) or request_id in self._lost.get(client, ())

    def submit(self, message: Submit, aborted_by: str) -> None:
        """Send a request to the scheduler. One that is open is sent again only where the client
        has done so (`message.client_retry`), and then all of its choices are to end once more."""
        requests = self._open.setdefault(message.client, {})
        if message.request_id in requests and not message.client_retry:
            return
        requests[message.request_id] = OpenRequest(message, message.params.n, aborted_by)
        self._scheduler.send(message)
        if aborted_by:
            self._scheduler.send(AbortRequest(message.client, message.request_id, aborted_by))

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """Abort one request of a client, or with an empty id all of them."""
        for name, request in self._open.get(client, {}).items():
            if request_id in ("", name):
                request.aborted_by = by
        self._scheduler.send(AbortRequest(client, request_id, by))

    def ended(self, client: bytes, request_ids: list[str]) -> None:
        """Count a choice of each of these requests as ended."""
        requests = self._open.get(client, {})
        for request_id in request_ids:
            request = requests.get(request_id)
            if request is not None:
                request.num_choices -= 1
                if request.num_choices <= 0:
                    del requests[request_id]
        if not requests:
            self._open.pop(client, None)

    def lose(self, client: bytes) -> None:
        """Abort all requests of a client whose connection is lost, and remember their names."""
        self.abort(client, "", CLIENT_LOST)
        names = set(self._open.pop(client, ()))
        if not names:
            return
        self._forget_lost(client)
        self._lost[client] = names
        self._num_lost += len(names)
        while len(self._lost) > MAX_LOST_CLIENTS or self._num_lost > MAX_LOST_REQUESTS:
            self._forget_lost(next(iter(self._lost)))

    def _forget_lost(self, client: bytes) -> None:
        self._num_lost -= len(self._lost.pop(client, ()))

    def send_again(self) -> None:
        """Send everything to another scheduler, which ignores what its journal knows."""
        for client in self._lost:
            if client not in self._open:
                self._scheduler.send(AbortRequest(client, "", CLIENT_LOST))
        for client, requests in self._open.items():
            for request_id, request in requests.items():
                self._scheduler.send(msgspec.structs.replace(request.submit, frontend_retry=True))
                if request.aborted_by:
                    self._scheduler.send(AbortRequest(client, request_id, request.aborted_by))
