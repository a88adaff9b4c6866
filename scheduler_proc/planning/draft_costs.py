"""Seconds of the steps in which the model itself, at fewer bits, drafts guesses."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from quadriga.wire.messages.worker import DraftCost
from scheduler_proc.planning.guess_costs import GuessSourceCosts


class DraftCosts(GuessSourceCosts):
    """What drafts cost: a round is a decode step of the rows, with weights of fewer bits."""

    # The draft is the same model: as many of its tokens are right in most of a text.
    prior_right = 1.0
    memory = 0.9
    fading = 0.99

    def __init__(self, costs: Sequence[DraftCost]) -> None:
        """Begin with what the worker measured at its start, for two numbers of rows at least."""
        self._rows = [cost.num_rows for cost in costs]
        # A smaller step is never slower: a measurement that says so was disturbed.
        seconds = reversed([cost.seconds for cost in costs])
        self._seconds = list(accumulate(seconds, min))[::-1]

    def numbers_of_rounds(self, most: int) -> Sequence[int]:
        """Return all numbers of rounds: each round is a step."""
        return range(1, most + 1)

    def round_s(self, num_rows: int) -> float:
        """Return the seconds of a draft step, interpolated; 0.0 for no rows."""
        if not num_rows:
            return 0.0
        end = min(max(bisect_left(self._rows, num_rows), 1), len(self._rows) - 1)
        rows, seconds = self._rows[end - 1 : end + 1], self._seconds[end - 1 : end + 1]
        slope = (seconds[1] - seconds[0]) / (rows[1] - rows[0])
        return seconds[1] + slope * (num_rows - rows[1])
