"""How many tokens the worker may guess in each row of a decode step.

A guess costs what a step takes longer with one more token, which the worker has measured, and
brings a token if it and all guesses of its row before it are right, for which the request's recent
guesses stand. So the guesses that are most likely to be right come first, as long as they raise the
tokens per second of the step (guess_choice.py). With many rows a further token costs as much as it
brings, and nothing is guessed. What steps with guesses really take and bring is compared with steps
without (guess_trial.py).
"""

from collections.abc import Sequence

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.arrays import num_ids
from quadriga.wire.messages.worker import GuessedRow, StepCost, StepResult
from scheduler_proc.planning.draft_costs import DraftCosts
from scheduler_proc.planning.guess_choice import GuessChoice
from scheduler_proc.planning.guess_costs import GuessSourceCosts, StepCosts
from scheduler_proc.planning.guess_trial import GuessTrial
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.guess_record import PRIOR_WRONG, GuessRecord
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request

MAX_GUESSING_ROWS = 32  # in a larger step a further token costs its full share of the time
# The guesses of all requests: their prior, over that of one request, and the weight of earlier ones
# at each further row with guesses and at each step without.
ALL_WEIGHT, ALL_MEMORY, ALL_FADING = 4.0, 0.95, 0.99
MAX_TRYING_ROWS = 8  # in a larger step a try is not worth its time


class GuessPolicy:
    """Plan guesses: as many as the flags allow (ngram), or as many as pay (auto, self)."""

    def __init__(
        self, args: SchedulerArgs, costs: Sequence[StepCost], source: GuessSourceCosts
    ) -> None:
        self._most = args.num_speculative_tokens
        self._costs = None if args.speculative_method == "ngram" else StepCosts(costs)
        self._source = source
        self._of_all = GuessRecord(  # of all requests, by which new ones are judged
            ALL_WEIGHT * source.prior_right, ALL_WEIGHT * PRIOR_WRONG, ALL_MEMORY
        )
        self._trials: dict[int, GuessTrial] = {}  # by the binary digits of the number of rows

    def group_of(self, request: Request) -> bytes:
        """Return the name of the requests from whose answers this one's may be guessed."""
        return request.tenant.encode() + b"\0" + request.cache_salt

    def plan(self, batch: ScheduleBatch, kv: KVCache) -> None:
        """Add guesses to the rows of a step that only decodes, and the pages that they need."""
        # A row that is cut must not get pages either, as it computes all that they hold.
        limits = {
            row: min(self._most, most)
            for row, request in enumerate(batch.requests)
            if (most := _most_guesses(request)) > 0 and row not in batch.cut_rows
        }
        if not limits:
            return
        if self._costs is not None:
            if sum(batch.num_tokens) > MAX_GUESSING_ROWS or not self._trial_of(batch).may_guess():
                return
            limits = self._that_pay(self._costs, batch, limits)
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
        seconds = result.ended - result.began
        if self._costs is not None and batch.num_decodes == batch.batch_size and seconds > 0.0:
            self._compare(self._costs, batch, result.guessed, seconds)

    def _compare(
        self, costs: StepCosts, batch: ScheduleBatch, guessed: list[GuessedRow], seconds: float
    ) -> None:
        """Compare the seconds of a step, and the tokens that it brought, with the expected ones."""
        num_tokens, counts = sum(batch.num_tokens), [row.num_guesses for row in guessed]
        trial, plain_s = self._trial_of(batch), costs.seconds(num_tokens)
        if not counts:
            trial.observe_plain(seconds / plain_s)
            return
        added_s = costs.seconds(num_tokens + sum(counts)) - plain_s + self._source.all_s(counts)
        num_right = sum(num_ids(row.token_ids) for row in guessed)
        trial.observe_guesses(
            sum(counts), num_right / batch.batch_size, seconds / plain_s, added_s / plain_s
        )

    def _trial_of(self, batch: ScheduleBatch) -> GuessTrial:
        size = batch.batch_size.bit_length()
        if size not in self._trials:
            self._trials[size] = GuessTrial(1 << size - 1)
        return self._trials[size]

    def _that_pay(
        self, costs: StepCosts, batch: ScheduleBatch, limits: dict[int, int]
    ) -> dict[int, int]:
        """Return the numbers of guesses that raise the tokens per second most."""
        trial = self._trial_of(batch)
        choice = GuessChoice(
            costs, self._source, batch.batch_size, sum(batch.num_tokens), trial.cost_factor
        )
        records = {row: self._record(batch.requests[row]) for row in limits}
        rates = {row: record.rate for row, record in records.items()}
        numbers = choice.numbers(rates, limits, trial.max_guesses)
        tries = batch.batch_size <= MAX_TRYING_ROWS and choice.one_can_pay
        for row in [row for row, number in numbers.items() if not number]:
            records[row].fade(self._source.fading)
            if tries:
                numbers[row] = int(records[row].may_try())
        return numbers

    def _record(self, request: Request) -> GuessRecord:
        if request.guess_record is None:
            rate, weight = self._of_all.rate, self._source.prior_right + PRIOR_WRONG
            request.guess_record = GuessRecord(
                rate * weight, (1.0 - rate) * weight, self._source.memory
            )
        return request.guess_record


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
    args: SchedulerArgs, costs: Sequence[StepCost], drafts: Sequence[StepCost] = ()
) -> GuessPolicy | None:
    """Return the policy of --speculative-method; None for none, or if the worker cannot guess.

    Args:
        args: The flags.
        costs: Seconds of decode steps.
        drafts: Seconds of the steps that draft guesses; empty: guesses are looked up.
    """
    if args.speculative_method == "none" or len(costs) < 2:
        return None
    return GuessPolicy(args, costs, DraftCosts(drafts) if drafts else GuessSourceCosts())
