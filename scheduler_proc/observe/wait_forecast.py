"""When each waiting request will probably be admitted: the queue is played forward.

Running requests end after the lengths that recent answers had, or at their max_new_tokens; each end
makes room for the next requests of the queue, which run and end in their turn. All that run get a
token with each decode step, and a prompt delays all of them by the time that it is computed.

A single future is played, with lengths that are spread evenly over those of recent answers, so that
the first of many ends comes early, as it does.
"""

import heapq
from typing import NamedTuple, Protocol

from scheduler_proc.core import SchedulerCore
from scheduler_proc.observe.recent_ends import RecentEnds
from scheduler_proc.planning.admission import MAX_EXPECTED_TOKENS
from scheduler_proc.state.request import Request, RequestStatus

# Multiples of the golden ratio, without their whole parts, are spread evenly.
GOLDEN_RATIO = 0.6180339887498949


class _RunningEnd(NamedTuple):
    """An end in the future: after how many decode steps, and the tokens of KV that it frees."""

    step: float
    num_tokens: float


class ForecastSpeed(Protocol):
    """How long steps take, as StepSpeed has it."""

    @property
    def decode_s(self) -> float | None:
        """Seconds of a step without prompts; None: unknown."""

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds for which a prompt token delays all else."""


class WaitForecast:
    """One future of the waiting queue, from now on.

    Args:
        core: the queue, the running batch and the pages as they are.
        ends: answers that ended lately.
        speed: how long steps take.
    """

    def __init__(self, core: SchedulerCore, ends: RecentEnds, speed: ForecastSpeed) -> None:
        self._ends = ends
        self._ratio = core.admission.ratio.value
        self._width = core.width
        self._uncached_share = ends.uncached_share
        self._num_slots = core.admission.num_free_slots
        self._num_free_tokens = float(core.kv.num_available * core.kv.page_size)
        self._decode_s = speed.decode_s
        self._s_per_token = speed.prefill_s_per_token
        self._num_drawn = 0
        self._step = 0.0
        self._prefill_s = 0.0
        self._running: list[_RunningEnd] = []
        for request in core.admission.holders.values():
            self._add_holder(request)
        heapq.heapify(self._running)

    def wait_s(self, request: Request) -> float | None:
        """Return the seconds until the next request of the queue is admitted; None: unknown."""
        num_prompt = self._uncached_share * request.num_known_tokens
        num_left = request.max_total_tokens - request.num_known_tokens
        num_needed = num_prompt + self._ratio * min(num_left, MAX_EXPECTED_TOKENS)
        while self._running and not (self._num_slots and num_needed <= self._num_free_tokens):
            self._end_one()
        if self._step and self._decode_s is None:
            return None
        wait_s = self._prefill_s + self._step * (self._decode_s or 0.0)
        self._prefill_s += num_prompt * self._s_per_token
        self._num_slots -= 1
        self._num_free_tokens -= num_needed
        steps = self._draw(request, request.num_generated + num_left) - request.num_generated - 1
        heapq.heappush(self._running, _RunningEnd(self._step + steps * self._turns, num_needed))
        return wait_s

    @property
    def _turns(self) -> float:
        """Decode steps in which each running request gets a token, where they take turns."""
        return max(1.0, (len(self._running) + 1) / self._width)

    def _add_holder(self, request: Request) -> None:
        num_growing = min(request.num_remaining_tokens, MAX_EXPECTED_TOKENS)
        self._num_free_tokens -= self._ratio * num_growing
        num_tokens = self._uncached_share * request.num_known_tokens + self._ratio * num_growing
        limit = request.max_total_tokens - request.num_prompt
        steps = self._draw(request, limit) - request.num_generated
        if request.status is RequestStatus.PREFILLING:
            self._prefill_s += request.num_uncomputed_tokens * self._s_per_token
        self._running.append(_RunningEnd(steps * self._turns, num_tokens))

    def _end_one(self) -> None:
        end = heapq.heappop(self._running)
        self._step = max(self._step, end.step)
        self._num_slots += 1
        self._num_free_tokens += end.num_tokens

    def _draw(self, request: Request, limit: int) -> int:
        """Return the length of an answer."""
        if not request.can_stop:
            return limit
        self._num_drawn += 1
        share = self._num_drawn * GOLDEN_RATIO % 1
        return self._ends.length(request.num_generated, limit, share)
