"""What guesses add to the time of a step, learned from the steps that run."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from scheduler_proc.state.guess_record import MEMORY, PRIOR_RIGHT

SIZES = (0, 1, 2, 4, 8, 16, 32, 64)  # numbers of guesses whose time is learned
# What a guess is taken to add before any was measured, in steps without guesses. A decode step
# waits for the weights, and some more tokens are nearly free; where they are not, the first steps
# with guesses, which have few, say so.
PRIOR_STEPS = 0.04
PRIOR_COUNT = 3.0  # steps for which that stands
MEASURED_MEMORY = 0.95  # weight of the earlier steps of a number of guesses at each further one
MIN_STEPS = 0.005  # that a further guess adds: it is never free
MIN_FACTOR = 0.25  # of PRIOR_STEPS, however long nothing was guessed


class AddedTime:
    """What numbers of guesses add to a step, in steps of the same rows without guesses.

    It is interpolated between SIZES. A number of which little is known is taken to add more or less
    than PRIOR_STEPS say by as much as the next smaller number.
    """

    def __init__(self) -> None:
        self._measured = [0.0] * len(SIZES)
        self._expected = [0.0] * len(SIZES)
        self._prior_factor = 1.0
        self._steps = self._learned()

    def steps(self, num_guesses: int) -> float:
        """Return what guesses add, in steps without guesses."""
        end = min(max(bisect_left(SIZES, num_guesses), 1), len(SIZES) - 1)
        return self._steps[end] + self._slope(end) * (num_guesses - SIZES[end])

    def min_steps(self) -> float:
        """Return the least that any further guess adds."""
        return min(map(self._slope, range(1, len(SIZES))))

    def observe(self, num_guesses: int, steps: float) -> None:
        """Take in what the guesses of a step have added."""
        end = min(max(bisect_left(SIZES, num_guesses), 1), len(SIZES) - 1)
        share = (num_guesses - SIZES[end - 1]) / (SIZES[end] - SIZES[end - 1])
        for place, weight in ((end - 1, max(0.0, 1.0 - share)), (end, share)):
            memory = 1.0 - (1.0 - MEASURED_MEMORY) * min(weight, 1.0)
            # The time of a size is judged by that of the number nearby, in proportion to the prior.
            self._measured[place] = memory * self._measured[place] + weight * steps
            expected = weight * PRIOR_STEPS * num_guesses
            self._expected[place] = memory * self._expected[place] + expected
        self._prior_factor = 1.0
        self._steps = self._learned()

    def fade(self, weight: float) -> None:
        """Trust what was measured less, and take guesses to add less, so that they are tried."""
        self._measured = [weight * measured for measured in self._measured]
        self._expected = [weight * expected for expected in self._expected]
        self._prior_factor = max(MIN_FACTOR, weight * self._prior_factor)
        self._steps = self._learned()

    def _learned(self) -> list[float]:
        """Return the steps of SIZES, each with MIN_STEPS more than the size before at least."""
        learned, factor = [0.0], self._prior_factor
        for place in range(1, len(SIZES)):
            prior = PRIOR_STEPS * SIZES[place]
            known = PRIOR_COUNT * prior
            factor = (known * factor + self._measured[place]) / (known + self._expected[place])
            factor = max(0.0, factor)
            least = learned[-1] + MIN_STEPS * (SIZES[place] - SIZES[place - 1])
            learned.append(max(least, factor * prior))
        return learned

    def _slope(self, end: int) -> float:
        return (self._steps[end] - self._steps[end - 1]) / (SIZES[end] - SIZES[end - 1])


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
