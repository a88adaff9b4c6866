"""Seconds of steps that compute guesses, and of what makes the guesses."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from quadriga.wire.messages.worker import StepCost
from scheduler_proc.state.guess_record import MEMORY, PRIOR_RIGHT

# What a further token adds at least, in steps of one token. It is never free, and what is learned
# later is a factor of it.
MIN_SLOPE = 0.005


class StepCosts:
    """Seconds of a decode step by its number of tokens, interpolated between measured ones."""

    def __init__(self, costs: Sequence[StepCost]) -> None:
        self._sizes = [cost.num_tokens for cost in costs]
        # A smaller step is never slower: a measurement that says so was disturbed.
        shortest = list(accumulate((cost.seconds for cost in reversed(costs)), min))[::-1]
        self._seconds, least = shortest[:1], MIN_SLOPE * shortest[0]
        for (begin, end), end_s in zip(pairwise(self._sizes), shortest[1:], strict=True):
            self._seconds.append(max(end_s, self._seconds[-1] + least * (end - begin)))
        spans = zip(pairwise(self._sizes), pairwise(self._seconds), strict=True)
        self._slopes = [
            (end_s - begin_s) / (end - begin) for (begin, end), (begin_s, end_s) in spans
        ]

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of a step, in proportion to those of other sizes."""
        end = self._end_of_span(num_tokens)
        return self._seconds[end] + self._slopes[end - 1] * (num_tokens - self._sizes[end])

    def min_s_per_token(self, num_tokens: int) -> float:
        """Return the least seconds that any further token adds to a step of so many."""
        return min(self._slopes[self._end_of_span(num_tokens + 1) - 1 :])

    def _end_of_span(self, num_tokens: int) -> int:
        return min(max(bisect_left(self._sizes, num_tokens), 1), len(self._sizes) - 1)


class GuessSourceCosts:
    """What the worker spends on guesses before the step computes them: nothing for a look-up.

    It makes the guesses in rounds; each round makes one more for some of the rows.

    Attributes:
        prior_right: right guesses that are taken for granted of a new request.
        memory: weight of a request's earlier guesses at each of its steps with guesses.
        fading: the same at each of its steps without.
    """

    prior_right = PRIOR_RIGHT
    memory = MEMORY
    fading = 1.0

    def numbers_of_rounds(self, most: int) -> Sequence[int]:
        """Return the numbers of rounds to choose from, of which a larger one may cost more."""
        return (most,)

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
