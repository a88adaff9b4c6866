"""Speculative decoding: how many draft tokens the worker may compute in each row of a decode step.

A draft token is called a guess here. It costs what a step takes longer with one more token, and
brings a token if it and all guesses of its row before it are right, for which the request's recent
guesses stand. The guesses that are most likely to be right come first, as long as they raise the
tokens per second of the step. With many rows a further token costs as much as it brings, and
nothing is guessed.

In this order: what guesses add to the time of a step, what it costs to make them, the choice of
their number, the account of what they gain and lose, and the policy that the core calls
(`GuessPolicy`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import num_ids
from quadriga.wire.worker import DraftCost, StepResult
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import MEMORY, PRIOR_RIGHT, PRIOR_WRONG, GuessRecord, Request


def interpolated(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """Return the value of a size between, or beyond, those that have values."""
    end = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    slope = (values[end] - values[end - 1]) / (sizes[end] - sizes[end - 1])
    return values[end] + slope * (size - sizes[end])


# What guesses add to the time of a step, learned from the steps that run.

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
        return interpolated(SIZES, self._steps, num_guesses)

    def min_steps(self) -> float:
        """Return the least that any further guess adds."""
        pairs = zip(pairwise(self._steps), pairwise(SIZES), strict=True)
        return min((more - less) / (larger - size) for (less, more), (size, larger) in pairs)

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


# What it costs to make guesses.


class DraftCosts(Protocol):
    """What the worker spends on guesses before the step computes them.

    It makes them in rounds; each round makes one more for some of the rows.

    Attributes:
        prior_right: right guesses that are taken for granted of a new request.
        memory: weight of a request's earlier guesses at each of its steps with guesses.
        fading: the same at each of its steps without.
    """

    prior_right: float
    memory: float
    fading: float

    def numbers_of_rounds(self, most: int) -> Sequence[int]:
        """Return the numbers of rounds to choose from, of which a larger one may cost more."""

    def round_s(self, num_rows: int) -> float:
        """Return the seconds of a round for so many rows; 0.0 for none."""


class LookedUpDrafts:
    """Guesses that are looked up in earlier text, in no time that counts."""

    prior_right = PRIOR_RIGHT
    memory = MEMORY
    fading = 1.0

    def numbers_of_rounds(self, most: int) -> Sequence[int]:
        """Return the largest number of rounds: fewer save nothing."""
        return (most,)

    def round_s(self, num_rows: int) -> float:  # noqa: ARG002 (as DraftCosts has it)
        """Return 0.0."""
        return 0.0


class ModelDrafts:
    """Guesses of the model itself: a round is a decode step, with weights of fewer bits."""

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
        return interpolated(self._rows, self._seconds, num_rows) if num_rows else 0.0


def one_more_s(drafts: DraftCosts, num_rows: int) -> float:
    """Return by how many seconds one more row prolongs a round of `num_rows`."""
    return drafts.round_s(num_rows + 1) - drafts.round_s(num_rows)


def all_rounds_s(drafts: DraftCosts, num_guesses: Sequence[int]) -> float:
    """Return the seconds of all rounds, by the number of guesses of each row."""
    places = range(max(num_guesses, default=0))
    return sum(drafts.round_s(sum(count > place for count in num_guesses)) for place in places)


# Which guesses raise the tokens per second of a step most.

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

    def __init__(self, added: AddedTime, drafts: DraftCosts, num_rows: int, plain_s: float) -> None:
        """Prepare the choice.

        Args:
            added: what guesses add to such a step.
            drafts: what it costs to make guesses.
            num_rows: of the step, each of which brings a token without guesses.
            plain_s: seconds of the step without guesses.
        """
        self._added = added
        self._drafts = drafts
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
        for num_rounds in self._drafts.numbers_of_rounds(max(limits.values())):
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
        return self._rate(1.0, 1, one_more_s(self._drafts, 0)) > MIN_GAIN * self._num_rows

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
        right, draft_s, best, best_rate = 0.0, 0.0, 0, 0.0
        rows_by_place: dict[int, int] = {}
        for count, (chance, _row, place) in enumerate(guesses, 1):
            right += chance
            num_rows = rows_by_place.get(place, 0)
            draft_s += one_more_s(self._drafts, num_rows)
            rows_by_place[place] = num_rows + 1
            rate = self._rate(right, count, draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best, best_rate

    def _rate(self, num_right: float, num_guesses: int, draft_s: float) -> float:
        """Return the tokens of the step with so many guesses, in the time of one without."""
        steps = 1.0 + self._added.steps(num_guesses) + draft_s / self._plain_s
        return (self._num_rows + num_right) / steps


# What guesses take and bring in steps of one number of tokens, and when to pause.
#
# Steps with guesses are compared with steps without, some of which are made for that. What guesses
# add to the time of a step is learned in steps without guesses, not in seconds: when the machine
# becomes slower, or the contexts longer, both kinds of steps change alike.
#
# An account has what guessing has gained and lost. When it is empty, no step has guesses until the
# steps without have filled it again, by a small share of their time. So guessing loses no more than
# what the account can have, and that share.

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

    def observe_guesses(self, number: int, gained: float, seconds: float, draft_s: float) -> None:
        """Take in a step with guesses.

        Args:
            number: of the guesses.
            gained: tokens that right guesses brought, over those of a step without guesses.
            seconds: of the step.
            draft_s: seconds of these that were expected for making the guesses.
        """
        if not self._num_plain:
            return
        took, drafting = seconds / self.plain_s, draft_s / self.plain_s
        most = MAX_RATIO * (1.0 + self.added.steps(number) + drafting)
        if took <= most:
            self.max_guesses = max(self.max_guesses, 2 * number)
        took = min(took, most)
        self.added.observe(number, took - drafting - 1.0)
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


# Tokens of a step beyond which none is guessed: there a further one costs its full share of the
# time on most CPUs.
MAX_GUESSING_TOKENS = 4
# The guesses of all requests: their prior, over that of one request, and the weight of earlier ones
# at each further row with guesses and at each step without.
ALL_WEIGHT, ALL_MEMORY, ALL_FADING = 4.0, 0.95, 0.99


class GuessPolicy:
    """Plan guesses: as many as the flags allow (ngram), or as many as pay (auto, self)."""

    def __init__(self, args: SchedulerArgs, drafts: DraftCosts) -> None:
        self._most = args.num_speculative_tokens
        self._only_what_pays = args.speculative_method != "ngram"
        self._drafts = drafts
        self._of_all = GuessRecord(  # of all requests, by which new ones are judged
            ALL_WEIGHT * drafts.prior_right, ALL_WEIGHT * PRIOR_WRONG, ALL_MEMORY
        )
        self._trials: dict[int, GuessTrial] = {}  # by the tokens of steps without guesses

    def group_of(self, request: Request) -> bytes:
        """Return the name of the requests from whose answers this one's may be guessed."""
        return request.tenant.encode() + b"\0" + request.cache_salt

    def plan(self, batch: ScheduleBatch, kv: KVCache) -> None:
        """Add guesses to the rows of a step that only decodes, and the pages that they need."""
        if self._only_what_pays and not self._may_guess(batch):
            return
        # A row that is cut must not get pages either, as it computes all that they hold.
        limits = {
            row: min(self._most, most)
            for row, request in enumerate(batch.requests)
            if (most := _most_guesses(request)) > 0 and row not in batch.cut_rows
        }
        if not limits:
            return
        if self._only_what_pays:
            limits = self._that_pay(batch, limits)
        if any(limits.values()):
            batch.num_guesses = [limits.get(row, 0) for row in range(batch.batch_size)]
            _add_pages(batch, batch.num_guesses, kv)

    def observe(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Take in which guesses of a step were right, and how long it took."""
        for row in result.guessed:
            record = self._record(batch.requests[row.row])
            record.observe(row.num_guesses, num_ids(row.token_ids))
            self._of_all.observe(row.num_guesses, num_ids(row.token_ids))
        if not result.guessed:
            self._of_all.fade(ALL_FADING)
        if self._only_what_pays and _is_small(batch) and result.ended > result.began:
            self._compare(batch, result)

    def _may_guess(self, batch: ScheduleBatch) -> bool:
        return _is_small(batch) and self._trial_of(batch).may_guess()

    def _compare(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Compare the seconds of a step, and the tokens that it brought, with those of others."""
        trial, seconds = self._trial_of(batch), result.ended - result.began
        if not result.guessed:
            trial.observe_plain(seconds)
            return
        counts = [row.num_guesses for row in result.guessed]
        num_right = sum(num_ids(row.token_ids) for row in result.guessed)
        trial.observe_guesses(
            sum(counts), num_right / batch.batch_size, seconds, all_rounds_s(self._drafts, counts)
        )

    def _trial_of(self, batch: ScheduleBatch) -> GuessTrial:
        num_tokens = sum(batch.num_tokens)
        if num_tokens not in self._trials:
            self._trials[num_tokens] = GuessTrial(num_tokens)
        return self._trials[num_tokens]

    def _that_pay(self, batch: ScheduleBatch, limits: dict[int, int]) -> dict[int, int]:
        """Return the numbers of guesses that raise the tokens per second most."""
        trial = self._trial_of(batch)
        choice = GuessChoice(trial.added, self._drafts, batch.batch_size, trial.plain_s)
        records = {row: self._record(batch.requests[row]) for row in limits}
        rates = {row: record.rate for row, record in records.items()}
        numbers = choice.numbers(rates, limits, trial.max_guesses)
        tries = choice.one_can_pay
        for row in [row for row, number in numbers.items() if not number]:
            records[row].fade(self._drafts.fading)
            if tries:
                numbers[row] = int(records[row].may_try())
        return numbers

    def _record(self, request: Request) -> GuessRecord:
        if request.guess_record is None:
            rate, weight = self._of_all.rate, self._drafts.prior_right + PRIOR_WRONG
            request.guess_record = GuessRecord(
                rate * weight, (1.0 - rate) * weight, self._drafts.memory
            )
        return request.guess_record


def _is_small(batch: ScheduleBatch) -> bool:
    """Return whether a step only decodes, and so few tokens that guesses may pay."""
    return (
        0 < batch.num_decodes == batch.batch_size <= MAX_GUESSING_TOKENS
        and sum(batch.num_tokens) <= MAX_GUESSING_TOKENS
    )


def _most_guesses(request: Request) -> int:
    """Return how many tokens the request may still generate after the one that its row samples."""
    return 0 if request.finished else request.num_remaining_tokens


def _add_pages(batch: ScheduleBatch, num_guesses: list[int], kv: KVCache) -> None:
    """Give rows the pages of their guesses and of a token more, while others need none of them."""
    for request, count in zip(batch.requests, num_guesses, strict=True):
        wanted = min(request.num_computed_tokens + count + 1, request.max_total_tokens)
        while count and request.page_capacity < wanted and kv.num_available > batch.batch_size:
            batch.grown += (request.slot, kv.append_page(request))


def make_guess_policy(
    args: SchedulerArgs, can_guess: bool, drafts: Sequence[DraftCost] = ()
) -> GuessPolicy | None:
    """Return the policy of --speculative-method; None for none, or if the worker cannot guess.

    Args:
        args: the flags.
        can_guess: whether the worker can.
        drafts: seconds of the steps that draft guesses; empty: guesses are looked up.
    """
    if args.speculative_method == "none" or not can_guess:
        return None
    return GuessPolicy(args, ModelDrafts(drafts) if drafts else LookedUpDrafts())
