"""Which guesses raise the tokens per second of a step most."""

from collections.abc import Mapping
from typing import NamedTuple

from scheduler_proc.planning.guess_costs import AddedTime, GuessSourceCosts

MIN_GAIN = 1.05  # tokens per second with guesses, over those without
MIN_CHANCE = 0.05  # to be right, below which nothing is guessed


class Guess(NamedTuple):
    """A guess that may be made.

    Attributes:
        chance: that it and those before it in its row are right.
        row: of the step.
        place: in the row, from 0.
    """

    chance: float
    row: int
    place: int


class GuessChoice:
    """Choose the guesses of one step by what they cost and how likely they are to be right."""

    def __init__(
        self, added: AddedTime, source: GuessSourceCosts, num_rows: int, plain_s: float
    ) -> None:
        """Prepare the choice.

        Args:
            added: what guesses add to such a step.
            source: what it costs to make guesses.
            num_rows: of the step, each of which brings a token without guesses.
            plain_s: seconds of the step without guesses.
        """
        self._added = added
        self._source = source
        self._num_rows = num_rows
        self._plain_s = plain_s

    def numbers(
        self, rates: Mapping[int, float], limits: Mapping[int, int], max_guesses: int
    ) -> dict[int, int]:
        """Return the number of guesses of each row, 0 for those in which none pays.

        Args:
            rates: by row, the chance of a guess to be right if all of its row before it are.
            limits: by row, the largest number of guesses.
            max_guesses: largest number of guesses of all rows together.
        """
        guesses = self._by_chance(rates, limits)
        best: list[Guess] = []
        best_rate, rate_before = MIN_GAIN * self._num_rows, 0.0
        for num_rounds in self._source.numbers_of_rounds(max(limits.values())):
            some = [guess for guess in guesses if guess.place < num_rounds][:max_guesses]
            count, rate = self._best_count(some)
            if rate <= rate_before:
                break
            rate_before = rate
            if rate > best_rate:
                best, best_rate = some[:count], rate
        numbers = dict.fromkeys(limits, 0)
        for guess in best:
            numbers[guess.row] += 1
        return numbers

    @property
    def one_can_pay(self) -> bool:
        """Whether a single guess pays if it is right."""
        return self._rate(1.0, 1, self._source.one_more_s(0)) > MIN_GAIN * self._num_rows

    def _by_chance(self, rates: Mapping[int, float], limits: Mapping[int, int]) -> list[Guess]:
        """Return the guesses that may be made, the likeliest ones first.

        A guess that is less likely to be right than `min_chance` lowers the tokens per second,
        whatever is guessed before it.
        """
        min_chance = max(MIN_CHANCE, self._added.min_steps() * self._num_rows)
        guesses = []
        for row, rate in rates.items():
            chance = rate
            for place in range(limits[row]):
                if chance <= min_chance:
                    break
                guesses.append(Guess(chance, row, place))
                chance *= rate
        return sorted(guesses, reverse=True)

    def _best_count(self, guesses: list[Guess]) -> tuple[int, float]:
        """Return how many of the first guesses bring most tokens in a time, and how many tokens."""
        right, source_s, best, best_rate = 0.0, 0.0, 0, 0.0
        rows_by_place: dict[int, int] = {}
        for count, (chance, _row, place) in enumerate(guesses, 1):
            right += chance
            num_rows = rows_by_place.get(place, 0)
            source_s += self._source.one_more_s(num_rows)
            rows_by_place[place] = num_rows + 1
            rate = self._rate(right, count, source_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def _rate(self, num_right: float, num_guesses: int, source_s: float) -> float:
        """Return the tokens of the step with so many guesses, in the time of one without."""
        steps = 1.0 + self._added.steps(num_guesses) + source_s / self._plain_s
        return (self._num_rows + num_right) / steps
