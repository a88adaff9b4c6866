"""Refuse requests while too many are waiting, before any work is spent on them."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quadriga.errors import QueueFull

NUM_RECENT_ENDS = 64
# For work that takes milliseconds.
RETRY_AFTER_S = 1.0
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 1, 60
# After a refusal a retry is worth it when this share of the queue has probably been admitted.
FREED_SHARE = 0.25


def check_room(num_present: int, limit: int, what: str, num_added: int = 1) -> None:
    """Raise QueueFull if something that is soon done has reached its limit.

    Args:
        num_present: number of what is under way.
        limit: largest number.
        what: the words that follow the number, such as "questions are not answered yet".
        num_added: number of what is new.
    """
    if num_present + num_added > limit:
        raise QueueFull(
            f"{num_present} {what}, and at most {limit} may be; try again in {RETRY_AFTER_S:g} s",
            RETRY_AFTER_S,
        )


class OverloadGuard:
    """Enforce --max-queued-requests and --max-requests-per-client on new requests.

    Only the scheduler knows how many choices wait. Here their number is the one that it reported
    last, plus the choices that were submitted since then, plus those of requests in preparation.

    The hint when to try again follows from the wait that the scheduler expects, and where it has
    reported none, from the rate at which requests end.
    """

    def __init__(
        self,
        max_queued: int,
        max_per_client: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_queued = max_queued
        self._max_per_client = max_per_client
        self._clock = clock
        self._num_reported = 0
        self._reported_wait_s: float | None = None
        self._num_submitted = 0
        self._num_preparing = 0
        self._ended_at: deque[float] = deque(maxlen=NUM_RECENT_ENDS)

    def check(self, num_choices: int, count_open: Callable[[], int]) -> None:
        """Raise QueueFull for a request that is too much.

        Args:
            num_choices: number of its choices.
            count_open: returns the number of open requests of its client.
        """
        num_waiting = self._num_reported + self._num_submitted + self._num_preparing
        if num_waiting + num_choices > self._max_queued:
            wait_s = self._reported_wait_s
            if wait_s is None:
                wait_s = self._ends_in_s(num_waiting + 1)
            retry_after = _retry_after_s(FREED_SHARE * (wait_s or 0.0))
            raise QueueFull.of_waiting(
                num_waiting, self._max_queued, retry_after, num_waiting + 1, wait_s
            )
        if self._max_per_client is not None and (num_open := count_open()) >= self._max_per_client:
            retry_after = _retry_after_s(self._ends_in_s(1) or 0.0)
            raise QueueFull.of_client(num_open, self._max_per_client, retry_after)

    @contextmanager
    def preparing(self, num_choices: int) -> Iterator[None]:
        """Count choices as waiting while their request is prepared."""
        self._num_preparing += num_choices
        try:
            yield
        finally:
            self._num_preparing -= num_choices

    def count_submitted(self, num_choices: int) -> None:
        """Count choices as waiting until the scheduler reports the next length of its queue."""
        self._num_submitted += num_choices

    def count_ended(self, num_choices: int) -> None:
        """Note that choices ended now."""
        self._ended_at.extend([self._clock()] * num_choices)

    def update_queue(self, num_waiting: int, wait_s: float | None) -> None:
        """Take in the length of the scheduler's waiting queue, and the wait of one more request.

        wait_s: estimated seconds; None where the queue is far from full, or nothing is known.
        """
        self._num_reported, self._num_submitted = num_waiting, 0
        self._reported_wait_s = wait_s

    def _ends_in_s(self, num_ends: int) -> float | None:
        """Return the seconds in which this many choices probably end; None if that is unknown."""
        if len(self._ended_at) < 2:
            return None
        return (self._clock() - self._ended_at[0]) / len(self._ended_at) * num_ends


def _retry_after_s(seconds: float) -> int:
    """Return the hint for something that is expected in `seconds` seconds."""
    return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, math.ceil(seconds)))
