"""Seconds of steps that compute guesses, and of what makes the guesses."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from quadriga.wire.messages.worker import StepCost
from scheduler_proc.state.guess_record import PRIOR_RIGHT

SCALE_WEIGHT, SIZE_WEIGHT = 0.1, 0.02  # of a step, in what is known of all and of its size
MAX_CHANGE = 2.0  # a step that took longer than that was disturbed


class StepCosts:
    """Seconds of a decode step by its number of tokens, interpolated.

    They begin with what the worker has measured when it started, and follow the steps that it runs.
    """

    def __init__(self, costs: Sequence[StepCost]) -> None:
        self._sizes = [cost.num_tokens for cost in costs]
        self._seconds: list[float] = []
        for cost in costs:  # a larger step is never faster: a measurement may be disturbed
            self._seconds.append(max([cost.seconds, *self._seconds[-1:]]))
        self._scale = 1.0  # of all sizes: contexts become longer, and the machine busier

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of a step, in proportion to those of other sizes."""
        sizes, seconds = self._sizes, self._seconds
        end = min(max(bisect_left(sizes, num_tokens), 1), len(sizes) - 1)
        slope = (seconds[end] - seconds[end - 1]) / (sizes[end] - sizes[end - 1])
        return seconds[end] + slope * (num_tokens - sizes[end])

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in the seconds of a step; what is unusual for its size alone changes that size."""
        index = bisect_left(self._sizes, num_tokens)
        if index == len(self._sizes) or seconds <= 0.0:
            return
        ratio = seconds / self.seconds(num_tokens)
        self._scale += SCALE_WEIGHT * (ratio - self._scale)
        change = min(max(ratio / self._scale, 1 / MAX_CHANGE), MAX_CHANGE)
        lowest = self._seconds[index - 1] if index else 0.0
        highest = self._seconds[index + 1] if index + 1 < len(self._sizes) else math.inf
        changed = self._seconds[index] * (1 + SIZE_WEIGHT * (change - 1))
        self._seconds[index] = min(max(changed, lowest), highest)


class GuessSourceCosts:
    """What the worker spends on guesses before the step computes them: nothing for a look-up.

    It makes the guesses in rounds; each round makes one more for some of the rows.

    Attributes:
        prior_right: right guesses that are taken for granted of a new request.
    """

    prior_right = PRIOR_RIGHT

    def round_s(self, num_rows: int) -> float:  # noqa: ARG002 (of other sources)
        """Return the seconds of a round for so many rows; 0.0 for none."""
        return 0.0

    def one_more_s(self, num_rows: int) -> float:
        """Return by how many seconds one more row prolongs a round of `num_rows`."""
        return self.round_s(num_rows + 1) - self.round_s(num_rows)

    def all_s(self, num_guesses: Iterable[int]) -> float:
        """Return the seconds of all rounds, by the number of guesses of each row."""
        counts = list(num_guesses)
        places = range(max(counts, default=0))
        return sum(self.round_s(sum(count > place for count in counts)) for place in places)
