"""The answers to what clients ask: the server info, and how far requests are."""

import os
from typing import NamedTuple

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.client import Info, InfoValues, ProgressAnswer, RequestProgress, RequestState
from quadriga.wire.to_detok import InfoReply, ProgressReply
from quadriga.wire.to_scheduler import InfoRequest, ProgressRequest
from quadriga.wire.worker import WorkerReady
from scheduler_proc.core import SchedulerCore
from scheduler_proc.forecast import WaitForecast
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.planning.quarantine import is_quarantined
from scheduler_proc.planning.step_cost import StepCosts
from scheduler_proc.state.request import Request, RequestStatus

# Gauges of the scheduler for the server info, as docs/protocol.md lists them.


def collect_info(args: SchedulerArgs, ready: WorkerReady | None, core: SchedulerCore) -> InfoValues:
    """Return the gauges of worker, policy and pool. ready: None before the worker is."""
    values: InfoValues = {
        "ready": ready is not None,
        "dtype": ready.dtype if ready else None,
        "device": ready.device if ready else None,
        "attention_backend": ready.backend if ready else None,
        "kernels": ready.kernels if ready else None,
        "cuda_graph": ready.cuda_graph if ready else None,
        "batch_mode": args.mode,
        "batching": args.batching,
        "schedule_policy": args.schedule_policy,
        "fair_clients": args.fair_clients,
        "prefix_cache": not args.disable_radix_cache,
        "chunked_prefill_size": args.chunk_size(ready.prefill_tokens) if ready else None,
    }
    if args.fair_tenants:
        values["fair_tenants"] = True
    if ready is not None:
        values |= {
            "page_size": core.kv.page_size,
            "pages_total": core.kv.num_pages,
            "pages_free": core.kv.num_free,
            "pages_cached": core.kv.num_cached,
            "pages_held": core.kv.num_held,
            "retractions": core.num_retractions,
            "new_token_ratio": core.admission.ratio.value,
        }
    return values


def info_reply(message: InfoRequest, values: InfoValues, ready: WorkerReady | None) -> InfoReply:
    """Return the Info that a client asked for: what the frontend knows, and `values`."""
    values = message.values | values
    pids = message.values.get("pids")
    if isinstance(pids, dict):
        worker = ready.pid if ready else 0
        values["pids"] = pids | {"scheduler_proc": os.getpid(), "worker_proc": worker}
    return InfoReply(message.client, Info(message.request_id, values))


# How far requests are: their places in the waiting queue, and when they are probably admitted.
#
# Nothing is computed unless a client asks or the queue is nearly full, and the places are
# determined at most once in MAX_AGE_S, however many questions come.

MAX_AGE_S = 0.1
# A long queue takes longer to read and to simulate, and changes less: 1 % of the time or so is
# spent on it, as the worker may wait meanwhile.
MAX_AGE_S_PER_REQUEST, MAX_AGE_S_PER_STEP = 0.0001, 0.006
# Further requests are taken to be admitted at the rate of these first ones.
MAX_SIMULATED = 1024
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
    """A place in the waiting queue, from 1, and the estimated seconds until admission.

    They count from the time at which the places were determined; None: unknown.
    """

    place: int
    wait_s: float | None


NO_PLACE = QueuePlace(0, None)


class ProgressReport:
    """Answer how far requests are."""

    def __init__(self, lifecycle: RequestLifecycle, costs: StepCosts, max_queued: int) -> None:
        self._num_nearly_full = max(NEARLY_FULL * max_queued, MIN_NEARLY_FULL)
        self._lifecycle = lifecycle
        self._costs = costs
        self._places: dict[int, QueuePlace] = {}
        self._places_at = self._places_until = 0.0
        self._last_wait_s: float | None = None

    def values(self, message: ProgressRequest, now: float) -> list[RequestProgress]:
        """Return the progress of each request of a question."""
        self._refresh(now)
        age_s = now - self._places_at
        return [self._value(message, request_id, age_s) for request_id in message.request_ids]

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
            self._places, num_steps = places_in_queue(self._lifecycle, self._costs)
            self._places_at = now
            self._last_wait_s = next(reversed(self._places.values()), NO_PLACE).wait_s
            work_s = MAX_AGE_S_PER_REQUEST * len(self._places) + MAX_AGE_S_PER_STEP * num_steps
            max_age_s = max(MAX_AGE_S, work_s)
            self._places_until = now + max_age_s

    def _value(self, message: ProgressRequest, request_id: str, age_s: float) -> RequestProgress:
        # An empty id would stand for all requests of the client.
        table = self._lifecycle.table
        choices = table.of_client(message.client, request_id) if request_id else []
        if not choices:
            is_preparing = request_id in message.preparing
            return RequestProgress(RequestState.PREPARING if is_preparing else RequestState.UNKNOWN)
        values = (self._of_choice(request, age_s) for request in choices)
        return max(values, key=lambda value: (RANKS[value.state], -value.place))

    def _of_choice(self, request: Request, age_s: float) -> RequestProgress:
        state, place = STATES[request.status], NO_PLACE
        if state is RequestState.QUEUED:
            if self._lifecycle.grammars.holds(request):
                state = RequestState.PREPARING
            else:
                place = self._place(request, age_s)
        num_computed = min(request.num_computed_tokens, request.num_prompt)
        return RequestProgress(state, *place, num_computed, request.num_prompt)

    def _place(self, request: Request, age_s: float) -> QueuePlace:
        """Return the place of a queued request; age_s: seconds since the places were determined.

        One that is quarantined, or came a moment ago, follows the others.
        """
        wait_s = None if is_quarantined(request) else self._last_wait_s
        last = QueuePlace(len(self._lifecycle.core.waiting) + 1, wait_s)
        place, wait_s = self._places.get(request.seq, last)
        return QueuePlace(place, None if wait_s is None else max(0.0, wait_s - age_s))


def places_in_queue(
    lifecycle: RequestLifecycle, costs: StepCosts
) -> tuple[dict[int, QueuePlace], int]:
    """Return the place of each waiting request by its number, in the order of the policy.

    With them comes the number of steps that were simulated.
    """
    core = lifecycle.core
    num_waiting = len(core.waiting)
    if not num_waiting:
        return {}, 0
    requests = core.waiting.first(num_waiting, core.prefill.budget.tokens)
    forecast = WaitForecast(
        core, lifecycle.recent_ends, costs.wall_seconds, requests[:MAX_SIMULATED]
    )
    forecast.run()
    places, last, wait_s = {}, 0, None
    for place, request in enumerate(requests, start=1):
        place_wait_s = forecast.wait_s(request) if place <= MAX_SIMULATED else None
        if place_wait_s is not None:
            last, wait_s = place, place_wait_s
        elif wait_s is not None:
            place_wait_s = wait_s * place / last
        places[request.seq] = QueuePlace(place, place_wait_s)
    return places, forecast.num_steps


def progress_reply(message: ProgressRequest, values: list[RequestProgress]) -> ProgressReply:
    """Return the ProgressAnswer that a client asked for."""
    return ProgressReply(message.client, ProgressAnswer(message.request_id, values))
