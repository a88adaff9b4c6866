"""What guesses take and bring in steps of one number of tokens, and when to pause.

Steps with guesses are compared with steps without, some of which are made for that:

- What guesses add to the time of a step is learned, for the choice of their number.
- An account has what guessing has gained and lost. When it is empty, no step has guesses until the
  steps without have filled it again, by a small share of their time. So guessing loses no more than
  what the account can have, and that share.

All times but `plain_s` are in steps without guesses.
"""

from dataclasses import dataclass, field

from scheduler_proc.planning.guess_costs import AddedTime

MIN_PLAIN = 4  # steps without guesses before the first one with them
# Of the steps, one of so many has no guesses: while guessing gains, and while that is uncertain.
PLAIN_EVERY, PLAIN_EVERY_IN_DOUBT = 32, 8
PLAIN_WEIGHT = 0.15  # of a step without guesses in the mean, once there are some
MAX_RATIO = 2.0  # of a step's time to the expected one: one that took longer was disturbed
# While nothing is guessed and the account is full, what is known is forgotten by this, and guesses
# are taken to add less and less, so that they are tried again.
FADING = 0.999
MARGIN = 1.01  # tokens that a step with guesses has to bring for its time
# Most that the account has: for any number of tokens, and further for one, whose luck varies.
LIMIT, LIMIT_OF_ONE_ROW = 2.0, 12.0
FIRST = 0.5  # of the limit, in a new account
REFILL = 0.0075  # what a step without guesses adds to the account
RESUME = 0.2  # of the limit, which an account that was empty needs before guessing goes on


@dataclass(slots=True)
class GuessTrial:
    """Steps with and without guesses, of `num_tokens` tokens that are no guesses.

    Attributes:
        plain_s: mean seconds of the steps without guesses; 0.0 before the first one.
        added: what guesses add to them.
        max_guesses: largest number of guesses in a step: twice as many as a step has had that did
            not take far longer than expected. So costs that are far too low cost little.
    """

    num_tokens: int
    plain_s: float = 0.0
    added: AddedTime = field(default_factory=AddedTime)
    max_guesses: int = field(init=False)
    _num_plain: int = 0
    _account: float = field(init=False)
    _is_paused: bool = False
    _turn: int = 0

    def __post_init__(self) -> None:
        """Begin with an account that lets guessing show what it brings."""
        self._account = FIRST * self._limit
        self.max_guesses = self.num_tokens

    def may_guess(self) -> bool:
        """Return whether the next step may have guesses, and count it."""
        if self._is_paused or self._num_plain < MIN_PLAIN:
            return False
        self._turn += 1
        in_doubt = self._account < self._limit / 2
        return self._turn % (PLAIN_EVERY_IN_DOUBT if in_doubt else PLAIN_EVERY) != 0

    def observe_plain(self, seconds: float) -> None:
        """Take in a step without guesses."""
        if self._num_plain >= MIN_PLAIN:
            seconds = min(seconds, MAX_RATIO * self.plain_s)
        self._num_plain += 1
        self.plain_s += max(PLAIN_WEIGHT, 1 / self._num_plain) * (seconds - self.plain_s)
        self._credit(REFILL)
        if self._account >= self._limit:
            self.added.fade(FADING)

    def observe_guesses(self, number: int, gained: float, seconds: float, source_s: float) -> None:
        """Take in a step with guesses.

        Args:
            number: of the guesses.
            gained: tokens that right guesses brought, over those of a step without guesses.
            seconds: of the step.
            source_s: seconds of these that were expected for making the guesses.
        """
        if not self._num_plain:
            return
        took, source = seconds / self.plain_s, source_s / self.plain_s
        most = MAX_RATIO * (1.0 + self.added.steps(number) + source)
        if took <= most:
            self.max_guesses = max(self.max_guesses, 2 * number)
        took = min(took, most)
        self.added.observe(number, took - source - 1.0)
        self._credit(1.0 + gained - MARGIN * took)

    @property
    def _limit(self) -> float:
        return LIMIT + LIMIT_OF_ONE_ROW / self.num_tokens

    def _credit(self, steps: float) -> None:
        self._account = min(self._account + steps, self._limit)
        if self._account <= 0.0:
            self._is_paused = True
            self.max_guesses = self.num_tokens
        elif self._account >= RESUME * self._limit:
            self._is_paused = False
