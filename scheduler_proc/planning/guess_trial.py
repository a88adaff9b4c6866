"""Whether guessing makes steps of one size bring more tokens per second: tried, not predicted.

Costs that were measured at the start may be wrong: a grammar looks at each guess, contexts grow,
and other programs take the memory bus. So some steps have no guesses, for comparison.
"""

from dataclasses import dataclass, field

PLAIN_EVERY = 32  # steps with guesses: one of so many has none
MIN_PLAIN, MIN_GUESSING = 4, 12  # steps of each kind before they are compared
MIN_GAIN = 1.03  # of guessing
WEIGHT = 0.06  # of a step in the means, once there are many
MAX_RATIO = 2.0  # of a step's seconds to the mean: one that took longer was disturbed
FIRST_PAUSE, MAX_PAUSE = 64, 4096  # steps


@dataclass(slots=True)
class StepMeans:
    """Means over steps of a kind."""

    count: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a step."""
        if self.count:
            seconds = min(seconds, MAX_RATIO * self.seconds)
        self.count += 1
        weight = max(WEIGHT, 1 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def rate(self) -> float:
        """Tokens per second; 0.0 before the first step."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class GuessTrial:
    """Steps with and without guesses, of about the same number of rows."""

    _plain: StepMeans = field(default_factory=StepMeans)
    _guessing: StepMeans = field(default_factory=StepMeans)
    _turn: int = 0
    _wait: int = 0
    _pause: int = FIRST_PAUSE

    def may_guess(self) -> bool:
        """Return whether the next step may have guesses, and count it."""
        if self._wait:
            self._wait -= 1
            return False
        self._turn += 1
        return self._turn % (2 if self._plain.count < MIN_PLAIN else PLAIN_EVERY) != 0

    def observe(self, has_guesses: bool, tokens: int, seconds: float) -> None:
        """Take in a step that brought so many tokens."""
        (self._guessing if has_guesses else self._plain).observe(tokens, seconds)
        if self._plain.count < MIN_PLAIN or self._guessing.count < MIN_GUESSING:
            return
        if self._guessing.rate >= MIN_GAIN * self._plain.rate:
            self._pause = FIRST_PAUSE
            return
        self._wait, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)
        self._guessing = StepMeans()
