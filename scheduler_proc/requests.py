"""Every request that has not ended, by its number and by its client."""

from collections.abc import Iterator

from quadriga.messages.to_scheduler import Submit
from scheduler_proc.request import Request


class LiveRequests:
    """Numbers requests as they come and forgets them when they end."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._next_seq = 0
        self._by_seq: dict[int, Request] = {}
        self._by_client: dict[bytes, dict[str, Request]] = {}

    def add(self, message: Submit) -> Request | None:
        """The request of a message; None where its client has sent it again and it is under way."""
        mine = self._by_client.setdefault(message.client, {})
        if message.request_id in mine:
            return None
        request = Request.from_submit(self._next_seq, message, self._eos_ids)
        self._next_seq += 1
        self._by_seq[request.seq] = mine[request.request_id] = request
        return request

    def numbered(self, seqs: list[int]) -> list[Request]:
        """Those of these numbers that have not ended."""
        return [self._by_seq[seq] for seq in seqs if seq in self._by_seq]

    def of(self, client: bytes, request_id: str = "") -> list[Request]:
        """One request of a client, or with an empty id all of them; unknown ones are left out."""
        mine = self._by_client.get(client, {})
        if not request_id:
            return list(mine.values())
        return [mine[request_id]] if request_id in mine else []

    def remove(self, request: Request) -> None:
        del self._by_seq[request.seq]
        mine = self._by_client[request.client]
        del mine[request.request_id]
        if not mine:
            del self._by_client[request.client]

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_seq.values()))
