"""Every request that has not ended, by its number and by its client."""

import time
from collections.abc import Iterator
from itertools import chain

from quadriga.wire.messages.to_scheduler import Submit
from scheduler_proc.durability.journal_recovery import RecoveredRequest, restored
from scheduler_proc.state.request import Request


def first_number() -> int:
    """Return a number above all that an earlier scheduler of this run can have given, written down
    or not: microseconds of a clock that is never set. What the other processes still say of that
    scheduler's requests must not meet new ones."""
    return time.monotonic_ns() // 1000


class RequestTable:
    """Numbers requests as they come and forgets them when they end."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._next_seq = 0
        self._by_seq: dict[int, Request] = {}
        self._by_client: dict[bytes, dict[str, list[Request]]] = {}

    def add(self, message: Submit) -> list[Request]:
        """A request for each choice that a message asks for. None of its name may be under way."""
        mine = self._by_client.setdefault(message.client, {})
        choices = mine[message.request_id] = []
        for index in range(message.params.n):
            request = Request.from_submit(self._next_seq, message, self._eos_ids, index)
            self._next_seq += 1
            self._by_seq[request.seq] = request
            choices.append(request)
        return list(choices)

    def number_from(self, seq: int) -> None:
        """New requests get numbers from this one on, and none of those that were restored."""
        self._next_seq = max(self._next_seq, seq)

    def restore(self, found: RecoveredRequest) -> Request:
        """A request of another scheduler, under its number; it is live unless it has ended."""
        request = restored(found, self._eos_ids)
        self._next_seq = max(self._next_seq, request.seq + 1)
        if not request.finished:
            self._by_seq[request.seq] = request
            mine = self._by_client.setdefault(request.client, {})
            mine.setdefault(request.request_id, []).append(request)
        return request

    def numbered(self, seqs: list[int]) -> list[Request]:
        """Those of these numbers that have not ended."""
        return [self._by_seq[seq] for seq in seqs if seq in self._by_seq]

    def of(self, client: bytes, request_id: str = "") -> list[Request]:
        """One request of a client with all its choices, or with an empty id all of them; unknown
        ones are left out."""
        mine = self._by_client.get(client, {})
        if not request_id:
            return list(chain.from_iterable(mine.values()))
        return list(mine.get(request_id, ()))

    def num_names_of(self, client: bytes) -> int:
        """Return how many requests of a client have not ended, each counted once."""
        return len(self._by_client.get(client, ()))

    def remove(self, request: Request) -> None:
        del self._by_seq[request.seq]
        mine = self._by_client[request.client]
        choices = mine[request.request_id]
        choices.remove(request)
        if not choices:
            del mine[request.request_id]
        if not mine:
            del self._by_client[request.client]

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_seq.values()))
