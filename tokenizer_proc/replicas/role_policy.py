"""How many replicas compute prompts for the others, by the load (--prefill-replicas auto).

A policy is a pure object: the router shows it the load at intervals, and the policy returns the
number of replicas that compute prompts from now on, 0 where every one does all of the work. New
requests go by the new roles, and those that run stay where they are.
"""

import math
from typing import NamedTuple, Protocol


class RoleLoad(NamedTuple):
    """What the router knows of the load.

    Attributes:
        prompt_s: seconds of steps that all replicas have spent on prompts since their start.
        prompt_tokens: prompt tokens that were computed in this time.
        page_tokens: tokens of a page.
        page_s: seconds in which a page moves to another replica where nothing is in its way; 0.0
            before any has moved.
        num_apart: requests so far whose prompts were given to replicas that compute them for
            others.
        num_handed_over: how many of these have gone on at another replica.
        num_rows: decode rows of all steps of all replicas.
        rows_s: the sum over these rows of what their step would have taken without prompts.
        shortest_s: seconds of the shortest kind of step.
        num_waiting_tokens: prompt tokens that wait for their computation now.
    """

    prompt_s: float
    prompt_tokens: int
    page_tokens: int
    page_s: float
    num_apart: int = 0
    num_handed_over: int = 0
    num_rows: int = 0
    rows_s: float = 0.0
    shortest_s: float = 0.0
    num_waiting_tokens: int = 0

    @property
    def copy_share(self) -> float:
        """Time in which a page moves, in proportion to that of its computation; 0.0: unknown."""
        if not self.prompt_s:
            return 0.0
        return self.page_s * self.prompt_tokens / (self.page_tokens * self.prompt_s)

    @property
    def waiting_s(self) -> float:
        """Seconds of steps that the prompts take which wait now."""
        token_s = self.prompt_s / self.prompt_tokens if self.prompt_tokens else 0.0
        return self.num_waiting_tokens * token_s


class RolePolicy(Protocol):
    """Decides how many replicas compute prompts."""

    def decide(self, load: RoleLoad, now: float) -> int:
        """Return how many replicas compute prompts from now on.

        Args:
            load: the load up to now.
            now: seconds, of any clock that does not go back.
        """


# Between two looks at the load, and the time over which it is averaged.
INTERVAL_S = 1.0
WINDOW_S = 10.0
# From one change of roles to the next.
HOLD_S = 5.0
# With --itl-target: what a step aims at, of the target, and the part of the time of a replica that
# only computes prompts in which it does so: the rest is what every step takes.
AIM, PREFILL_SHARE = 0.9, 0.9
# The present number stays while its load is at most so many times the least one. Then the smallest
# number with a load of at most so many times the least one takes its place.
STAY_TOLERANCE, CHOICE_TOLERANCE = 1.1, 1.05
# Without: replicas for prompts in proportion to the replicas that these keep busy, as each prompt
# that is computed elsewhere stops streams.
UNBOUNDED_SHARE, UNBOUNDED_MORE = 1.5, 1.0
# Of all replicas; the others must have room for every stream.
MAX_SHARE = 0.65
# Without --itl-target a new number must differ by more than this, or by this share of the present.
BAND, BAND_SHARE = 0.75, 0.1
# Pages that take longer to move than to compute stay where they are: all replicas are mixed.
MAX_COPY_SHARE = 1.0
# So are they where fewer of so many requests go on elsewhere, because their pages come too late or
# there is no room. That is tried again after a pause, and the next pause is twice as long.
NUM_TRIED, MIN_MOVED_SHARE = 32, 0.25
FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0


class FollowPrompts:
    """The number of replicas with which the busiest role has the least to do.

    The measure is the time of steps that prompts take: 2.0 where prompts alone would keep two
    replicas busy. It does not depend on the machine, the model or what is cached.

    With a target for steps (--itl-target) two loads are computed for each number K of N replicas,
    as if it held for the last seconds:

        steps   = step without prompts, with the streams at N - K replicas / target
        prompts = replicas that prompts keep busy, also with what waits now
                  / (K * PREFILL_SHARE + (N - K) * (1 - steps))

    What steps leave of the target at the other replicas is room for prompts, too. The larger of
    the two is the load of a K. So all replicas are mixed where their steps have room for all
    prompts, and there are no more replicas for prompts than leave the streams in time. A load that
    leaves 1 / sqrt(N) free is small enough, as N servers of one queue need no more in reserve for
    little waiting (Halfin and Whitt, 1981).

    Args:
        num_replicas: number of all replicas.
        target_s: --itl-target, in seconds; None: steps have no bound.
    """

    def __init__(self, num_replicas: int, target_s: float | None) -> None:
        self._num_replicas = num_replicas
        self._max = min(num_replicas - 1, max(1, int(MAX_SHARE * num_replicas)))
        self._step_s = None if target_s is None else AIM * target_s
        self._enough = 1 - 1 / math.sqrt(num_replicas)
        self._last: tuple[float, RoleLoad] | None = None  # when, and the load then
        self._num_busy, self._num_rows, self._rows_s, self._weight = 0.0, 0.0, 0.0, 0.0
        self._num = 0
        self._changed_at = self._paused_until = -math.inf
        self._pause_s = FIRST_PAUSE_S
        self._tried = 0, 0  # requests apart and handed over, when the present trial began

    def decide(self, load: RoleLoad, now: float) -> int:
        """Return how many replicas compute prompts from now on."""
        self._observe(load, now)
        if load.copy_share > MAX_COPY_SHARE or not self._do_move(load, now):
            self._num = 0
        elif now - self._changed_at >= HOLD_S:
            wanted = self._by_share() if self._step_s is None else self._by_load(load)
            if wanted != self._num:
                self._num, self._changed_at = wanted, now
        return self._num

    def _do_move(self, load: RoleLoad, now: float) -> bool:
        """Return whether requests do go on elsewhere, or it is time to try."""
        num_apart = load.num_apart - self._tried[0]
        if self._num and num_apart >= NUM_TRIED:
            num_moved = load.num_handed_over - self._tried[1]
            self._tried = load.num_apart, load.num_handed_over
            if num_moved < MIN_MOVED_SHARE * num_apart:
                self._paused_until = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            else:
                self._pause_s = FIRST_PAUSE_S
        return now >= self._paused_until

    def _by_share(self) -> int:
        """Return as many as prompts keep busy, times a factor."""
        wanted = UNBOUNDED_SHARE * self._num_busy + min(UNBOUNDED_MORE, self._num_busy)
        wanted = min(wanted, float(self._max))
        band = max(BAND, BAND_SHARE * self._num)
        return round(wanted) if abs(wanted - self._num) > band else self._num

    def _by_load(self, load: RoleLoad) -> int:
        """Return a number whose load is near the least one: the present one, if its load is."""
        loads = [self._load_with(num, load) for num in range(self._max + 1)]
        if loads[0] * STAY_TOLERANCE <= self._enough:
            return 0
        if loads[self._num] <= max(STAY_TOLERANCE * min(loads), self._enough):
            return self._num
        most = CHOICE_TOLERANCE * min(loads)
        return next(num for num, one in enumerate(loads) if one <= most)

    def _load_with(self, num: int, load: RoleLoad) -> float:
        """Return the load with `num` replicas for prompts."""
        assert self._step_s is not None
        shortest_s = load.shortest_s
        # What rows add to a step grows with the rows, and so as the others become fewer.
        step_s = self._rows_s / self._num_rows if self._num_rows else shortest_s
        rows_s = max(0.0, step_s - shortest_s)
        num_others = self._num_replicas - num
        rows_s *= (self._num_replicas - self._num) / num_others
        steps = (shortest_s + rows_s) / self._step_s
        room = PREFILL_SHARE * num + num_others * max(0.0, 1.0 - steps)
        # What waits is to be computed before the next change.
        num_busy = self._num_busy + load.waiting_s / HOLD_S
        return max(steps, num_busy / room if room else math.inf)

    def _observe(self, load: RoleLoad, now: float) -> None:
        """Average the load over the last seconds, of which the latest ones weigh most."""
        if self._last is not None and now > self._last[0]:
            began_at, before = self._last
            seconds = now - began_at
            kept = math.exp(-seconds / WINDOW_S)
            self._weight = kept * self._weight + (1 - kept)
            share = (1 - kept) / self._weight
            # A replica that was restarted counts from 0 again.
            num_busy = max(0.0, load.prompt_s - before.prompt_s) / seconds
            num_rows = max(0, load.num_rows - before.num_rows)
            rows_s = max(0.0, load.rows_s - before.rows_s)
            self._num_busy += share * (num_busy - self._num_busy)
            self._num_rows += share * (num_rows / seconds - self._num_rows)
            self._rows_s += share * (rows_s / seconds - self._rows_s)
        self._last = now, load
