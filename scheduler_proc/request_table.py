"""Every request that has not ended: by number, by client and by deadline."""

import time
from collections.abc import Iterator
from itertools import chain

from sortedcontainers import SortedDict

from quadriga.errors import DeadlineExceeded
from quadriga.wire import packing, to_scheduler
from scheduler_proc.journal.recovery import RecoveredRequest, restored
from scheduler_proc.planning.quarantine import count_losses
from scheduler_proc.state.request import Request

# Every request that has not ended: by number, by client, and by deadline.

QUEUE, TOTAL = "queue", "total"  # kinds of deadlines


def first_seq_after_restart() -> int:
    """Return a number above all that an earlier scheduler of this run can have given.

    It is the time in microseconds of a clock that is never set. Messages of the other processes
    about that scheduler's requests must not meet new ones.
    """
    return time.monotonic_ns() // 1000


class RequestTable:
    """Number requests as they come, and forget them when they end."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._next_seq = 0
        self._by_seq: dict[int, Request] = {}
        self._by_client: dict[bytes, dict[str, list[Request]]] = {}
        self._deadlines: SortedDict = SortedDict()

    def __len__(self) -> int:
        return len(self._by_seq)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_seq.values()))

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, message: to_scheduler.Submit) -> list[Request]:
        """Add a request for each choice that a message asks for, and return them.

        Of a request that moves these are the choices that go on, with their tokens. None of them
        may be in the table.
        """
        progress = {choice.index: choice for choice in message.progress}
        requests = [
            Request.from_submit(self._next_seq + index, message, self._eos_ids, index)
            for index in progress or range(message.params.n)
        ]
        self._next_seq += message.params.n
        for request in requests:
            if request.index in progress:
                choice = progress[request.index]
                request.take_over(packing.unpack_ids(choice.token_ids), choice.first_token_at)
                request.admitted_at = choice.admitted_at
                request.cached_tokens = choice.cached_tokens
                request.logprobs = list(choice.logprobs)
                request.prompt_logprobs = list(choice.prompt_logprobs)
                if request.trace is not None and choice.spans:
                    request.trace.go_on(choice.spans)
                count_losses(request, message.num_losses)
            self._insert(request)
        return requests

    def restore(self, recovered: RecoveredRequest) -> Request:
        """Return a request of an earlier scheduler, with its number; add it unless it has ended."""
        request = restored(recovered, self._eos_ids)
        self._next_seq = max(self._next_seq, request.seq + 1)
        if not request.finished:
            self._insert(request)
        return request

    def start_numbering_at(self, seq: int) -> None:
        """Give no new request a number below `seq`."""
        self._next_seq = max(self._next_seq, seq)

    def _insert(self, request: Request) -> None:
        self._by_seq[request.seq] = request
        by_id = self._by_client.setdefault(request.client, {})
        by_id.setdefault(request.request_id, []).append(request)
        for key in _deadlines_of(request):
            self._deadlines[key] = request

    def remove(self, request: Request) -> None:
        """Remove a request that ended."""
        del self._by_seq[request.seq]
        by_id = self._by_client[request.client]
        choices = by_id[request.request_id]
        choices.remove(request)
        if not choices:
            del by_id[request.request_id]
        if not by_id:
            del self._by_client[request.client]
        for key in _deadlines_of(request):
            self._deadlines.pop(key, None)

    # --- lookups ----------------------------------------------------------------------------------

    def with_seqs(self, seqs: list[int]) -> list[Request]:
        """Return the requests of these numbers that have not ended."""
        return [self._by_seq[seq] for seq in seqs if seq in self._by_seq]

    def of_client(self, client: bytes, request_id: str = "") -> list[Request]:
        """Return all choices of a client's request, or with an empty id all of its requests."""
        by_id = self._by_client.get(client, {})
        if not request_id:
            return list(chain.from_iterable(by_id.values()))
        return list(by_id.get(request_id, ()))

    def num_ids_of(self, client: bytes) -> int:
        """Return how many requests a client has open; choices of one count once."""
        return len(self._by_client.get(client, ()))

    # --- deadlines --------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """The first deadline to pass."""
        return self._deadlines.peekitem(0)[0][0] if self._deadlines else None

    def on_admitted(self, request: Request) -> None:
        """Drop the queue deadline of an admitted request. A retraction does not restore it."""
        if request.queue_deadline is not None:
            self._deadlines.pop((request.queue_deadline, request.seq, QUEUE), None)

    def expired(self, now: float) -> Iterator[tuple[Request, DeadlineExceeded]]:
        """Yield the requests whose deadline has passed, with their errors."""
        while self._deadlines and self._deadlines.peekitem(0)[0][0] <= now:
            (deadline, _seq, kind), request = self._deadlines.popitem(0)
            allowed = f"{deadline - request.received_at:.3g} s"
            if kind == QUEUE:
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


def _deadlines_of(request: Request) -> Iterator[tuple[float, int, str]]:
    if request.queue_deadline is not None:
        yield request.queue_deadline, request.seq, QUEUE
    if request.deadline is not None:
        yield request.deadline, request.seq, TOTAL
