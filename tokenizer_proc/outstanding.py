"""What the scheduler was sent and has not ended, to be sent again to another one.

A scheduler that dies takes along what it had received and not yet written down: what is on its way
to it, and what waits in its socket. It may be all that came while it stood still.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from quadriga.messages.to_scheduler import CLIENT_LOST, AbortRequest, Submit
from quadriga.sockets import Outbox

MOST_GONE = 1024
"""So many clients that are gone are remembered: the next scheduler ends what it has of them."""


@dataclass(slots=True)
class Sent:
    """A request as it was sent. choices: that have not ended. aborted_by: "" if it was not."""

    submit: Submit
    choices: int
    aborted_by: str = ""


class Outstanding:
    """Sends requests and aborts, and keeps them until the requests have ended."""

    def __init__(self, scheduler: Outbox) -> None:
        self._scheduler = scheduler
        self._sent: dict[bytes, dict[str, Sent]] = {}
        self._gone: deque[bytes] = deque(maxlen=MOST_GONE)

    def submit(self, message: Submit) -> None:
        """One that is under way is only sent again by a client that has to hear of it anew."""
        mine = self._sent.setdefault(message.client, {})
        if message.resent or message.request_id not in mine:
            mine[message.request_id] = Sent(message, message.params.n)
        self._scheduler.send(message)

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """One request of a client, or with an empty id all of them."""
        for sent in self._of(client, request_id):
            sent.aborted_by = by
        self._scheduler.send(AbortRequest(client, request_id, by))

    def _of(self, client: bytes, request_id: str) -> Iterator[Sent]:
        mine = self._sent.get(client, {})
        if not request_id:
            yield from mine.values()
        elif request_id in mine:
            yield mine[request_id]

    def ended(self, client: bytes, request_ids: list[str]) -> None:
        """Choices of these requests have ended."""
        mine = self._sent.get(client, {})
        for request_id in request_ids:
            if request_id in mine:
                mine[request_id].choices -= 1
                if mine[request_id].choices <= 0:
                    del mine[request_id]
        if not mine:
            self._sent.pop(client, None)

    def forget(self, client: bytes) -> None:
        """It is gone, and its requests were aborted."""
        if self._sent.pop(client, None) is not None:
            self._gone.append(client)

    def send_again(self) -> None:
        """To another scheduler. What it knows from the journal it does not take twice."""
        for client in self._gone:
            if client not in self._sent:
                self._scheduler.send(AbortRequest(client, "", CLIENT_LOST))
        for mine in self._sent.values():
            for request_id, sent in mine.items():
                self._scheduler.send(msgspec.structs.replace(sent.submit, again=True))
                if sent.aborted_by:
                    abort = AbortRequest(sent.submit.client, request_id, sent.aborted_by)
                    self._scheduler.send(abort)
