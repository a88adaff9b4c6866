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
    """

    prompt_s: float
    prompt_tokens: int
    page_tokens: int
    page_s: float
    num_apart: int = 0
    num_handed_over: int = 0

    @property
    def copy_share(self) -> float:
        """Time in which a page moves, in proportion to that of its computation; 0.0: unknown."""
        if not self.prompt_s:
            return 0.0
        return self.page_s * self.prompt_tokens / (self.page_tokens * self.prompt_s)


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
# Replicas for prompts, in proportion to the replicas that these keep busy. Where steps are bounded
# (--itl-target), the others compute prompts beside streams without harm, and take what comes in
# bursts. Without a bound each prompt that is computed there stops streams.
BOUNDED_SHARE = 0.5
UNBOUNDED_SHARE, UNBOUNDED_MORE = 1.5, 1.0
# Of all replicas; the others must have room for every stream.
MAX_SHARE = 0.65
# A new number must be better than the present one by more than this, or by this share of it.
BAND, BAND_SHARE = 0.75, 0.1
# Pages that take longer to move than to compute stay where they are: all replicas are mixed.
MAX_COPY_SHARE = 1.0
# So are they where fewer of so many requests go on elsewhere, because their pages come too late or
# there is no room. That is tried again after a pause, and the next pause is twice as long.
NUM_TRIED, MIN_MOVED_SHARE = 32, 0.25
FIRST_PAUSE_S, MAX_PAUSE_S = 60.0, 3600.0


class FollowPrompts:
    """As many replicas as prompts keep busy, times a factor.

    The measure is the time of steps that prompts take: 2.0 where prompts alone would keep two
    replicas busy. It does not depend on the machine, the model or what is cached.

    Args:
        num_replicas: number of all replicas.
        is_bounded: steps with prompts are cut to a target (--itl-target).
    """

    def __init__(self, num_replicas: int, is_bounded: bool) -> None:
        self._max = min(num_replicas - 1, max(1, int(MAX_SHARE * num_replicas)))
        self._is_bounded = is_bounded
        self._last: tuple[float, float] | None = None  # when, and the load's seconds then
        self._num_busy, self._weight = 0.0, 0.0
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
            wanted = min(self._wanted, float(self._max))
            band = max(BAND, BAND_SHARE * self._num)
            if abs(wanted - self._num) > band:
                self._num, self._changed_at = round(wanted), now
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

    @property
    def _wanted(self) -> float:
        num_busy = self._num_busy / self._weight if self._weight else 0.0
        if self._is_bounded:
            return BOUNDED_SHARE * num_busy
        return UNBOUNDED_SHARE * num_busy + min(UNBOUNDED_MORE, num_busy)

    def _observe(self, load: RoleLoad, now: float) -> None:
        """Average the number of replicas that prompts keep busy, the latest ones weigh most."""
        if self._last is not None and now > self._last[0]:
            began_at, before = self._last
            seconds = now - began_at
            kept = math.exp(-seconds / WINDOW_S)
            # A replica that was restarted counts from 0 again.
            num_busy = max(0.0, load.prompt_s - before) / seconds
            self._num_busy = kept * self._num_busy + (1 - kept) * num_busy
            self._weight = kept * self._weight + (1 - kept)
        self._last = now, load.prompt_s
