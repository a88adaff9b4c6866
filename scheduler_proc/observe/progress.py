"""How far requests are: their places in the waiting queue, and when they are probably admitted.

Nothing is computed unless a client asks, and the places are determined at most once in MAX_AGE_S,
however many questions come.
"""

from collections.abc import Callable
from typing import NamedTuple

from quadriga.wire.messages.public import ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.messages.to_detok import ProgressReply
from quadriga.wire.messages.to_scheduler import ProgressRequest
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.pipeline import Pipeline
from scheduler_proc.state.request import Request, RequestStatus

MAX_AGE_S = 0.1
# A queue of this share of --max-queued-requests, and of this length, is nearly full: a wait is
# estimated for the requests that may be refused. The ends of a shorter queue say as much.
NEARLY_FULL, MIN_NEARLY_FULL = 0.5, 32

STATES = {
    RequestStatus.WAITING: RequestState.QUEUED,
    RequestStatus.RETRACTED: RequestState.QUEUED,
    RequestStatus.PREFILLING: RequestState.PREFILL,
    RequestStatus.DECODING: RequestState.DECODING,
}
RANKS = {state: rank for rank, state in enumerate(RequestState)}


class QueuePlace(NamedTuple):
    """A place in the waiting queue, from 1, and the estimated seconds until admission."""

    place: int
    wait_s: float | None


NO_PLACE = QueuePlace(0, None)


class ProgressReport:
    """Answer how far requests are."""

    def __init__(self, lifecycle: RequestLifecycle, pipeline: Pipeline, max_queued: int) -> None:
        self._num_nearly_full = max(NEARLY_FULL * max_queued, MIN_NEARLY_FULL)
        self._lifecycle = lifecycle
        self._pipeline = pipeline
        self._places: dict[int, QueuePlace] = {}
        self._places_until = 0.0
        self._last_wait_s: float | None = None

    def values(self, message: ProgressRequest, now: float) -> list[RequestProgress]:
        """Return the progress of each request of a question."""
        self._refresh(now)
        return [self._value(message, request_id) for request_id in message.request_ids]

    def wait_if_nearly_full(self, now: float) -> float | None:
        """Return the estimated seconds that one more request would wait.

        None while the queue is far from full, or where nothing is known.
        """
        if len(self._lifecycle.core.waiting) < self._num_nearly_full:
            return None
        self._refresh(now)
        return self._last_wait_s

    def _refresh(self, now: float) -> None:
        if now >= self._places_until:
            self._places = places_in_queue(self._lifecycle, self._pipeline, now)
            self._last_wait_s = next(reversed(self._places.values()), NO_PLACE).wait_s
            self._places_until = now + MAX_AGE_S

    def _value(self, message: ProgressRequest, request_id: str) -> RequestProgress:
        # An empty id would stand for all requests of the client.
        table = self._lifecycle.table
        choices = table.of_client(message.client, request_id) if request_id else []
        if not choices:
            is_preparing = request_id in message.preparing
            return RequestProgress(RequestState.PREPARING if is_preparing else RequestState.UNKNOWN)
        return max(
            map(self._of_choice, choices), key=lambda value: (RANKS[value.state], -value.place)
        )

    def _of_choice(self, request: Request) -> RequestProgress:
        state, place = STATES[request.status], NO_PLACE
        if state is RequestState.QUEUED:
            if self._lifecycle.grammars.holds(request):
                state = RequestState.PREPARING
            else:  # a request that is quarantined, or came a moment ago, follows the others
                last = QueuePlace(len(self._lifecycle.core.waiting) + 1, None)
                place = self._places.get(request.seq, last)
        num_computed = min(request.num_computed_tokens, request.num_prompt)
        return RequestProgress(state, *place, num_computed, request.num_prompt)


def places_in_queue(
    lifecycle: RequestLifecycle, pipeline: Pipeline, now: float
) -> dict[int, QueuePlace]:
    """Return the place of each waiting request by its number, in the order of the policy.

    A request waits for a slot, and for the prompts before it: the longer of both counts.
    """
    core = lifecycle.core
    num_waiting = len(core.waiting)
    if not num_waiting:
        return {}
    requests = core.waiting.first(num_waiting, core.prefill_budget)
    holders = core.admission.holders.values()
    has_room = core.admission.can_admit(requests[0], core.admission.expected_tokens())
    num_free = core.admission.num_free_slots if has_room else 0
    slot_wait_s = _slot_wait_s(lifecycle, requests, now)
    s_per_token = pipeline.prefill_s_per_token
    num_tokens = sum(
        r.num_uncomputed_tokens for r in holders if r.status is RequestStatus.PREFILLING
    )
    places = {}
    for place, request in enumerate(requests, start=1):
        wait_s: float | None = num_tokens * s_per_token
        if place > num_free:
            slot_s = slot_wait_s(place - num_free)
            wait_s = None if slot_s is None else max(slot_s, num_tokens * s_per_token)
        places[request.seq] = QueuePlace(place, wait_s)
        num_tokens += request.num_uncomputed_tokens
    return places


def _slot_wait_s(
    lifecycle: RequestLifecycle, waiting: list[Request], now: float
) -> Callable[[int], float | None]:
    """Return a function of n: the seconds until n of the running requests have probably ended.

    It is n times the measured interval of ends, but no more than it takes n running requests to
    reach their max_new_tokens, each at its own speed up to now. None where neither is known.
    """
    new = (request.tokenized_at for request in waiting if not request.admitted_at)
    interval_s = lifecycle.slot_rate.interval_s(now, min(new, default=now))
    longest_s = sorted(
        (request.max_total_tokens - len(request.tokens))
        * (now - request.first_token_at)
        / (request.num_generated - 1)
        for request in lifecycle.core.admission.holders.values()
        if request.num_generated > 1 and not request.finished
    )

    def wait_s(num_ends: int) -> float | None:
        known = [] if interval_s is None else [num_ends * interval_s]
        known += longest_s[num_ends - 1 : num_ends]
        return min(known, default=None)

    return wait_s


def progress_reply(message: ProgressRequest, values: list[RequestProgress]) -> ProgressReply:
    """Return the ProgressAnswer that a client asked for."""
    return ProgressReply(message.client, ProgressAnswer(message.request_id, values))
