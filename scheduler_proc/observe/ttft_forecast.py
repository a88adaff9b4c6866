"""When a request that arrives now has its first token, so that a target is refused that fails.

The parts of the time: the step that runs, the prompts that go first, and the request's own prompt,
all at the prices of the last steps (step_cost.py); and where slots or pages are short, the wait for
running requests to end, as wait_forecast.py plays it.
"""

import math
from itertools import takewhile

from quadriga.errors import InvalidRequest, QuadrigaError, QueueFull
from scheduler_proc.core import SchedulerCore
from scheduler_proc.observe.recent_ends import RecentEnds
from scheduler_proc.observe.wait_forecast import WaitForecast
from scheduler_proc.policies.base import SortedQueue
from scheduler_proc.prefill.sharing import MAX_LEAD_STEPS, OLDEST_SHARE, age_of
from scheduler_proc.state.request import Request

MAX_PLAYED = 256  # requests of the queue that are looked at
MIN_RETRY_AFTER_S = 0.1


class ExpectedSpeed:
    """The speeds that WaitForecast needs, by the prices of steps."""

    def __init__(self, core: SchedulerCore) -> None:
        self.decode_s: float | None = core.costs.seconds(max(core.num_streams, 1)) or None
        tokens = core.prefill_budget
        more = core.costs.seconds(0, tokens, tokens * tokens // 2) - core.costs.seconds(0)
        self.prefill_s_per_token = max(0.0, more) / tokens


def refuse_target(
    core: SchedulerCore, ends: RecentEnds, request: Request, now: float
) -> QuadrigaError | None:
    """Return why the ttft_target of a new request cannot be met; None: it can, or is unknown."""
    target_s = request.sampling.params.ttft_target
    if target_s is None or not core.costs.knows_prompts:
        return None
    own_s = _prompt_s(core, request, num_streams=0)
    elapsed_s = max(0.0, now - request.received_at)
    num_new = request.num_known_tokens - core.num_cached(request)
    if own_s > target_s:
        return InvalidRequest(
            f"ttft_target is {target_s:g} s, and {num_new} prompt tokens that are not cached take"
            f" about {own_s:.3g} s on this server when it has nothing else to do: allow more, or"
            " shorten the prompt",
            "ttft_target",
        )
    ahead = _requests_ahead(core, request)
    if ahead is None:
        return None
    expected_s = elapsed_s + _ttft_s(core, ends, request, ahead)
    if expected_s <= target_s:
        return None
    retry_after_s = max(expected_s - target_s, MIN_RETRY_AFTER_S)
    return QueueFull(
        f"ttft_target is {target_s:g} s, and the first token is expected after {expected_s:.3g} s:"
        f" {len(ahead)} waiting requests go first and {core.num_streams} run; allow more, or try"
        f" again in {retry_after_s:.2g} s",
        retry_after_s,
        len(ahead) + 1,
        expected_s,
    )


def _requests_ahead(core: SchedulerCore, request: Request) -> list[Request] | None:
    """Return the waiting requests that go first, at most MAX_PLAYED; None: unknown.

    By other orders than that of due times, such as turns of tenants, it may be any of them.
    """
    queue = core.waiting
    if not len(queue):
        return []
    if not isinstance(queue, SortedQueue) or not queue.orders_by_due_time:
        return None
    queued, key = queue.first(MAX_PLAYED, core.prefill_budget), queue.key(request)
    return list(takewhile(lambda other: queue.key(other) < key, queued))


def _ttft_s(core: SchedulerCore, ends: RecentEnds, request: Request, ahead: list[Request]) -> float:
    costs, num_streams = core.costs, core.num_streams
    running_s = costs.seconds(num_streams) / 2 if num_streams else 0.0
    own_tokens = request.num_known_tokens - core.num_cached(request)
    first_s, is_shared = 0.0, False
    for other in core.partial_prefills:
        is_older = age_of(other) < age_of(request)
        if is_older and other.num_uncomputed_tokens <= own_tokens:
            first_s += _prompt_s(core, other, num_streams)
        else:
            is_shared = True
            running_s = max(running_s, costs.seconds(num_streams, core.prefill_budget) / 2)
    for other in ahead:
        first_s += _prompt_s(core, other, num_streams)
    own_s = _prompt_s(core, request, num_streams)
    compute_s = first_s + own_s
    if is_shared:  # newcomers have whole steps at first, and then their share
        step_s = costs.seconds(num_streams, core.prefill_budget)
        whole_s = step_s * MAX_LEAD_STEPS / OLDEST_SHARE
        compute_s += max(0.0, compute_s - whole_s) * (1 / (1 - OLDEST_SHARE) - 1)
    return max(running_s + compute_s, _room_s(core, ends, request, ahead) + own_s)


def _room_s(core: SchedulerCore, ends: RecentEnds, request: Request, ahead: list[Request]) -> float:
    """Return the seconds until slot and pages are free for a request; 0.0 where unknown."""
    pages = sum(core.kv.pages_needed(waiting) for waiting in (*ahead, request))
    if core.admission.num_free_slots > len(ahead) and core.kv.num_available >= pages:
        return 0.0
    forecast = WaitForecast(core, ends, ExpectedSpeed(core))
    for waiting in ahead:
        forecast.wait_s(waiting)
    return forecast.wait_s(request) or 0.0


def _prompt_s(core: SchedulerCore, request: Request, num_streams: int) -> float:
    """Return the seconds in which a prompt is computed beside streams."""
    computed = request.num_computed_tokens or core.num_cached(request)
    count = request.num_known_tokens - computed
    pairs = count * computed + count * (count + 1) // 2
    num_steps = math.ceil(count / core.prefill_budget)
    whole_s = core.costs.seconds(num_streams, count, pairs)
    return whole_s + (num_steps - 1) * core.costs.seconds(num_streams)
