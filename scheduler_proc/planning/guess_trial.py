"""What guesses really take and bring in steps of about one number of rows, and when to pause.

Costs that were measured at the start may be wrong: a grammar looks at each guess, contexts grow,
and other programs take the memory bus. So steps with guesses are compared with steps without, some
of which are made for that:

- What guesses add to the seconds of a step, over what they were expected to add, is a factor for
  the choice of their number.
- An account has what guessing has gained and lost. When it is empty, no step has guesses until the
  steps without have filled it again, by a small share of their time. So guessing loses no more than
  what the account can have, and that share.

All times are in steps without guesses of the same number of rows.
"""

from dataclasses import dataclass, field

MIN_PLAIN = 4  # steps without guesses before the first one with them
# Of the steps, one of so many has no guesses: while guessing gains, and while that is uncertain.
PLAIN_EVERY, PLAIN_EVERY_IN_DOUBT = 32, 8
PLAIN_WEIGHT = 0.15  # of a step without guesses in the mean, once there are some
MAX_RATIO = 2.0  # of a step's time to the expected one: one that took longer was disturbed
MEMORY = 0.98  # weight of the earlier steps with guesses at each further one
PRIOR = 4.0  # what guesses have to add in all before their measured time counts half
MIN_FACTOR, MAX_FACTOR = 0.25, 16.0
# While nothing is guessed and the account is full, what is known is forgotten by this, and guesses
# are taken to add less and less, so that they are tried again.
FADING = 0.999
MARGIN = 1.01  # tokens that a step with guesses has to bring for its time
# Most that the account has: for any number of rows, and further for one row, whose luck varies.
LIMIT, LIMIT_OF_ONE_ROW = 2.0, 12.0
FIRST = 0.5  # of the limit, in a new account
REFILL = 0.0075  # what a step without guesses adds to the account
RESUME = 0.2  # of the limit, which an account that was empty needs before guessing goes on


@dataclass(slots=True)
class GuessTrial:
    """Steps with and without guesses, of `num_rows` rows to nearly twice as many.

    Attributes:
        max_guesses: largest number of guesses in a step: twice as many as a step has had that did
            not take far longer than expected. So costs that are far too low cost little.
    """

    num_rows: int
    max_guesses: int = field(init=False)
    _num_plain: int = 0
    _plain: float = 1.0  # mean of steps without guesses, over the expected time
    _assumed_factor: float = 1.0
    _added: float = 0.0
    _expected_added: float = 0.0
    _account: float = field(init=False)
    _is_paused: bool = False
    _turn: int = 0

    def __post_init__(self) -> None:
        """Begin with an account that lets guessing show what it brings."""
        self._account = FIRST * self._limit
        self.max_guesses = self.num_rows

    @property
    def cost_factor(self) -> float:
        """What guesses add to the time of a step, over what they were expected to add."""
        factor = (PRIOR * self._assumed_factor + self._added) / (PRIOR + self._expected_added)
        return min(max(factor, MIN_FACTOR), MAX_FACTOR)

    def may_guess(self) -> bool:
        """Return whether the next step may have guesses, and count it."""
        if self._is_paused or self._num_plain < MIN_PLAIN:
            return False
        self._turn += 1
        in_doubt = self._account < self._limit / 2
        return self._turn % (PLAIN_EVERY_IN_DOUBT if in_doubt else PLAIN_EVERY) != 0

    def observe_plain(self, took: float) -> None:
        """Take in a step without guesses. took: its time, over the expected one."""
        if self._num_plain:
            took = min(took, MAX_RATIO * self._plain)
        self._num_plain += 1
        self._plain += max(PLAIN_WEIGHT, 1 / self._num_plain) * (took - self._plain)
        self._credit(REFILL)
        if self._account >= self._limit:
            self._assumed_factor *= FADING
            self._added *= FADING
            self._expected_added *= FADING

    def observe_guesses(self, number: int, gained: float, took: float, added: float) -> None:
        """Take in a step with guesses.

        Args:
            number: of the guesses.
            gained: tokens that right guesses brought, over those of a step without guesses.
            took: time of the step, over the expected one of a step without guesses.
            added: what the guesses were expected to add to that time.
        """
        if not self._num_plain:
            return
        took, most = took / self._plain, MAX_RATIO * (1.0 + self.cost_factor * added)
        if took <= most:
            self.max_guesses = max(self.max_guesses, 2 * number)
        took = min(took, most)
        self._assumed_factor = 1.0
        self._added = MEMORY * self._added + took - 1.0
        self._expected_added = MEMORY * self._expected_added + added
        self._credit(1.0 + gained - MARGIN * took)

    @property
    def _limit(self) -> float:
        return LIMIT + LIMIT_OF_ONE_ROW / self.num_rows

    def _credit(self, steps: float) -> None:
        self._account = min(self._account + steps, self._limit)
        if self._account <= 0.0:
            self._is_paused = True
            self.max_guesses = self.num_rows
        elif self._account >= RESUME * self._limit:
            self._is_paused = False
