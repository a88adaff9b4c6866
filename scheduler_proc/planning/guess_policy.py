"""How many tokens the worker may guess in each row of a decode step.

A guess costs what a step takes longer with one more token, and brings a token if it and all guesses
of its row before it are right, for which the request's recent guesses stand. So the guesses that
are most likely to be right come first, as long as they raise the tokens per second of the step
(guess_choice.py). With many rows a further token costs as much as it brings, and nothing is
guessed. What steps with guesses take and bring is learned from those that run, beside steps without
(guess_trial.py).
"""

from collections.abc import Sequence

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.arrays import num_ids
from quadriga.wire.messages.worker import DraftCost, StepResult
from scheduler_proc.planning.draft_costs import DraftCosts
from scheduler_proc.planning.guess_choice import GuessChoice
from scheduler_proc.planning.guess_costs import GuessSourceCosts
from scheduler_proc.planning.guess_trial import GuessTrial
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.guess_record import PRIOR_WRONG, GuessRecord
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request

# Tokens of a step beyond which none is guessed: there a further one costs its full share of the
# time on most CPUs.
MAX_GUESSING_TOKENS = 4
# The guesses of all requests: their prior, over that of one request, and the weight of earlier ones
# at each further row with guesses and at each step without.
ALL_WEIGHT, ALL_MEMORY, ALL_FADING = 4.0, 0.95, 0.99


class GuessPolicy:
    """Plan guesses: as many as the flags allow (ngram), or as many as pay (auto, self)."""

    def __init__(self, args: SchedulerArgs, source: GuessSourceCosts) -> None:
        self._most = args.num_speculative_tokens
        self._only_what_pays = args.speculative_method != "ngram"
        self._source = source
        self._of_all = GuessRecord(  # of all requests, by which new ones are judged
            ALL_WEIGHT * source.prior_right, ALL_WEIGHT * PRIOR_WRONG, ALL_MEMORY
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
            sum(counts), num_right / batch.batch_size, seconds, self._source.all_s(counts)
        )

    def _trial_of(self, batch: ScheduleBatch) -> GuessTrial:
        num_tokens = sum(batch.num_tokens)
        if num_tokens not in self._trials:
            self._trials[num_tokens] = GuessTrial(num_tokens)
        return self._trials[num_tokens]

    def _that_pay(self, batch: ScheduleBatch, limits: dict[int, int]) -> dict[int, int]:
        """Return the numbers of guesses that raise the tokens per second most."""
        trial = self._trial_of(batch)
        choice = GuessChoice(trial.added, self._source, batch.batch_size, trial.plain_s)
        records = {row: self._record(batch.requests[row]) for row in limits}
        rates = {row: record.rate for row, record in records.items()}
        numbers = choice.numbers(rates, limits, trial.max_guesses)
        tries = choice.one_can_pay
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
        args: The flags.
        can_guess: Whether the worker can.
        drafts: Seconds of the steps that draft guesses; empty: guesses are looked up.
    """
    if args.speculative_method == "none" or not can_guess:
        return None
    return GuessPolicy(args, DraftCosts(drafts) if drafts else GuessSourceCosts())
