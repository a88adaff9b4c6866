"""When a request that arrives now has its first token, so that a target is refused that fails.

The steps are played that come before it (wait_forecast.py), at the prices of the last ones.
"""

import math
from itertools import takewhile

from quadriga.errors import InvalidRequest, QuadrigaError, QueueFull
from scheduler_proc.core import SchedulerCore
from scheduler_proc.forecast.recent_ends import RecentEnds
from scheduler_proc.forecast.wait_forecast import WaitForecast
from scheduler_proc.policies.base import SortedQueue
from scheduler_proc.state.request import Request

MAX_PLAYED = 256  # requests of the queue that are looked at
MIN_RETRY_AFTER_S = 0.1


def refuse_target(
    core: SchedulerCore, ends: RecentEnds, request: Request, now: float
) -> QuadrigaError | None:
    """Return why the ttft_target of a new request cannot be met; None: it can, or is unknown."""
    target_s = request.sampling.params.ttft_target
    if target_s is None or not core.costs.knows_prompts:
        return None
    own_s = _prompt_alone_s(core, request)
    elapsed_s = max(0.0, now - request.received_at)
    num_new = request.num_known_tokens - core.kv.num_cached_tokens(request)
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
        f" {len(ahead)} waiting requests go first and {core.running.num_rows} run; allow more, or"
        f" try again in {retry_after_s:.2g} s",
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
    queued, key = queue.first(MAX_PLAYED, core.prefill.budget.tokens), queue.key(request)
    return list(takewhile(lambda other: queue.key(other) < key, queued))


def _ttft_s(core: SchedulerCore, ends: RecentEnds, request: Request, ahead: list[Request]) -> float:
    """Return the seconds until a request has its first token; at least so many if that is far."""
    forecast = WaitForecast(core, ends, core.costs, [*ahead, request])
    forecast.play(until=request)
    first_token_s = forecast.first_token_s(request)
    return forecast.played_s if first_token_s is None else first_token_s


def _prompt_alone_s(core: SchedulerCore, request: Request) -> float:
    """Return the seconds in which a prompt is computed beside nothing else."""
    num_cached = core.kv.num_cached_tokens(request)
    count = request.num_known_tokens - num_cached
    pairs = count * num_cached + count * (count + 1) // 2
    num_steps = math.ceil(count / core.prefill.budget.tokens)
    return core.costs.seconds(0, count, pairs) + (num_steps - 1) * core.costs.seconds(0)
