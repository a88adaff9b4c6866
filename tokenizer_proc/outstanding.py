"""The requests that are open: from when the front door lets them in until their last choice ends.

They are kept as they were sent to the scheduler, to be sent again to another one: a scheduler that
dies takes along what it had received and not yet written down, which is what is on its way to it
and what waits in its socket. It may be all that came while it stood still.
"""

from collections import deque
from dataclasses import dataclass

import msgspec

from quadriga.messages.to_scheduler import CLIENT_LOST, AbortRequest, Submit
from quadriga.sockets import Outbox

MOST_GONE = 1024
"""So many clients that are gone are remembered: the next scheduler ends what it has of them."""


@dataclass(slots=True)
class Open:
    """An open request. choices: that have not ended. resent: its client takes nothing of it before
    it was told anew. submit: what the scheduler was sent; None: it is being encoded. aborted_by: ""
    if it was not."""

    choices: int
    resent: bool = False
    submit: Submit | None = None
    aborted_by: str = ""

    @property
    def wanted(self) -> bool:
        """Its client is there."""
        return self.aborted_by != CLIENT_LOST


class Outstanding:
    """Counts what is open, sends it and its aborts to the scheduler, and keeps it."""

    def __init__(self, scheduler: Outbox) -> None:
        self._scheduler = scheduler
        self._open: dict[bytes, dict[str, Open]] = {}
        self._gone: deque[bytes] = deque(maxlen=MOST_GONE)

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def num_of(self, client: bytes) -> int:
        """How many open requests a client has."""
        return len(self._open.get(client, ()))

    def being_encoded(self, client: bytes, request_id: str) -> Open | None:
        one = self._find(client, request_id)
        return one if one is not None and one.submit is None else None

    def let_in(self, client: bytes, request_id: str, choices: int, resent: bool) -> Open:
        """It is worked on. resent: what is known of it already has to be told anew."""
        mine = self._open.setdefault(client, {})
        if resent or request_id not in mine:
            mine[request_id] = Open(choices, resent)
        return mine[request_id]

    def refused(self, client: bytes, request_id: str, refused: Open) -> None:
        """It was let in, and went no further."""
        if self._find(client, request_id) is refused and refused.submit is None:
            self._forget_one(client, request_id)

    def submit(self, one: Open, message: Submit) -> None:
        """It goes on to the scheduler, unless its client is gone."""
        if not one.wanted:
            return
        if message.resent:
            # What it was before may have ended in the meantime: that will be told again.
            one.choices = message.params.n
            self._open.setdefault(message.client, {})[message.request_id] = one
        if message.resent or one.submit is None:
            one.submit = message
        self._scheduler.send(message)
        if one.aborted_by:
            self._scheduler.send(AbortRequest(message.client, message.request_id, one.aborted_by))

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """One request of a client, or with an empty id all of them."""
        for name, one in self._open.get(client, {}).items():
            if request_id in ("", name):
                one.aborted_by = by
        self._scheduler.send(AbortRequest(client, request_id, by))

    def ended(self, client: bytes, request_ids: list[str]) -> None:
        """Choices of these requests have ended."""
        for request_id in request_ids:
            one = self._find(client, request_id)
            if one is not None:
                one.choices -= 1
                if one.choices <= 0:
                    self._forget_one(client, request_id)

    def _find(self, client: bytes, request_id: str) -> Open | None:
        return self._open.get(client, {}).get(request_id)

    def _forget_one(self, client: bytes, request_id: str) -> None:
        mine = self._open[client]
        del mine[request_id]
        if not mine:
            del self._open[client]

    def forget(self, client: bytes) -> None:
        """It is gone, and its requests were aborted."""
        if self._open.pop(client, None) is not None:
            self._gone.append(client)

    def send_again(self) -> None:
        """To another scheduler. What it knows from the journal it does not take twice."""
        for client in self._gone:
            if client not in self._open:
                self._scheduler.send(AbortRequest(client, "", CLIENT_LOST))
        for client, mine in self._open.items():
            for request_id, one in mine.items():
                if one.submit is None:
                    continue
                self._scheduler.send(msgspec.structs.replace(one.submit, again=True))
                if one.aborted_by:
                    self._scheduler.send(AbortRequest(client, request_id, one.aborted_by))
