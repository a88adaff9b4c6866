"""How good the guesses of one request were lately."""

from dataclasses import dataclass

PRIOR_RIGHT, PRIOR_WRONG = 0.5, 0.25  # what is taken for granted of a new request
MEMORY = 0.8  # weight of earlier guesses at each step with guesses
FIRST_PAUSE, MAX_PAUSE = 16, 256  # steps


@dataclass(slots=True)
class GuessRecord:
    """The recent guesses of a request, and when it may guess again where they were wrong.

    Attributes:
        prior_right, prior_wrong: guesses that are taken for granted.
        memory: weight of earlier guesses at each step with guesses.
        pause: steps without guesses before the next try; doubled while tries fail.
        wait: steps that are left of it.
    """

    prior_right: float = PRIOR_RIGHT
    prior_wrong: float = PRIOR_WRONG
    memory: float = MEMORY
    _right: float = 0.0
    _wrong: float = 0.0
    pause: int = FIRST_PAUSE
    wait: int = 0

    @property
    def rate(self) -> float:
        """The share of guesses that are right, of those whose predecessors were right."""
        right = self.prior_right + self._right
        return right / (right + self.prior_wrong + self._wrong)

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Take in the guesses of a step. Those after the first wrong one say nothing."""
        self._right = self.memory * self._right + num_right
        self._wrong = self.memory * self._wrong + (num_right < num_guesses)
        if num_right:
            self.pause = FIRST_PAUSE

    def fade(self, weight: float) -> None:
        """Trust earlier guesses less after a step without guesses."""
        self._right *= weight
        self._wrong *= weight

    def may_try(self) -> bool:
        """Return whether a request whose guesses do not pay should try one; count the step."""
        if self.wait > 0:
            self.wait -= 1
            return False
        self.wait = self.pause
        self.pause = min(2 * self.pause, MAX_PAUSE)
        return True
