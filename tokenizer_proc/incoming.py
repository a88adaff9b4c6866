"""The requests that have arrived and were not handed to the scheduler yet."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from quadriga.wire.messages.to_scheduler import CLIENT_LOST
from tokenizer_proc.preparation.prepare import Prepared


@dataclass(slots=True, eq=False)
class IncomingRequest:
    """A request whose prompt is being encoded, or whose grammar is being checked.

    Attributes:
        received_at: Unix seconds.
        num_choices: 1 before the message has been read.
        resent: the client has sent it before; it takes nothing of it that is not replayed first.
        aborted_by: as in AbortRequest, "" if it was not.
    """

    client: bytes
    request_id: str
    received_at: float
    num_choices: int
    resent: bool
    aborted_by: str = ""
    prepared: Prepared | None = None


class IncomingRequests:
    """Find incoming requests by client and id. Iterates over all of them."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, dict[str, IncomingRequest]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __iter__(self) -> Iterator[IncomingRequest]:
        return chain.from_iterable([list(one.values()) for one in self._by_client.values()])

    def __contains__(self, request: IncomingRequest) -> bool:
        return self.find(request.client, request.request_id) is request

    def find(self, client: bytes, request_id: str) -> IncomingRequest | None:
        return self._by_client.get(client, {}).get(request_id)

    def num_of(self, client: bytes) -> int:
        """Return how many requests of a client are incoming."""
        return len(self._by_client.get(client, ()))

    def add(self, request: IncomingRequest) -> None:
        """Add a request; there must be none of its client and id."""
        self._by_client.setdefault(request.client, {})[request.request_id] = request

    def remove(self, request: IncomingRequest) -> None:
        requests = self._by_client[request.client]
        del requests[request.request_id]
        if not requests:
            del self._by_client[request.client]

    def abort(self, client: bytes, request_id: str, by: str) -> None:
        """Mark one request of a client, or with an empty id all of them, as aborted. Those of a
        client that is lost are removed: nothing is to be sent for them."""
        for request in list(self._by_client.get(client, {}).values()):
            if request_id in ("", request.request_id):
                request.aborted_by = by
        if by == CLIENT_LOST:
            self._by_client.pop(client, None)
