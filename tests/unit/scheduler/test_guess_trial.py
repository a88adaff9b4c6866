"""Guessing ends where it loses, and begins where it pays, whatever steps cost.

A simulated worker runs the steps of the policy, which knows nothing of their costs at first. Each
of its steps is disturbed.
"""

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import num_ids, pack_ids
from quadriga.wire.worker import DraftCost, GuessedRow, StepResult
from scheduler_proc.planning.speculation import (
    MIN_PLAIN,
    RESUME,
    GuessPolicy,
    GuessTrial,
    ModelDrafts,
    make_guess_policy,
)
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import Request
from tests.unit.scheduler.requests import request_of

ANSWER = 128  # steps that a request takes part in

# Seconds of steps of a small model in bfloat16 on a CPU, and of drafts in 4 bits.
STEPS = {1: 7.8, 2: 8.3, 4: 9.2, 8: 10.0, 12: 10.8, 16: 14.0, 24: 18.5, 32: 29.0, 64: 54.0}
DRAFTS = {1: 3.5, 2: 3.5, 4: 4.2, 8: 7.0, 16: 14.0, 32: 25.0, 64: 50.0}


def costs_of(seconds: dict[int, float], factor: float = 1.0) -> list[DraftCost]:
    return [DraftCost(size, factor * of_size) for size, of_size in seconds.items()]


def policy_of(drafts: dict[int, float] | None = None, factor: float = 1.0) -> GuessPolicy:
    """Return a new policy; drafts: seconds that were measured of them, times `factor`."""
    args = SchedulerArgs(speculative_method="auto" if drafts is None else "self")
    policy = make_guess_policy(args, True, costs_of(drafts or {}, factor))
    assert policy is not None
    return policy


@dataclass(slots=True)
class GuessingRow:
    """A request, the chance of its guesses to be right, and the steps until its end."""

    request: Request
    chance: float
    num_steps: int


class GuessingWorker:
    """Run steps of `num_rows` requests that guess, by true costs.

    Attributes:
        chances: a guess whose predecessors are right is right with one of these chances, which
            each request draws.
        overhead: seconds that a step with guesses takes in any case.
        pace: of the machine; 2: each step takes twice as long.
    """

    def __init__(
        self,
        policy: GuessPolicy,
        num_rows: int,
        chances: Iterable[float],
        drafts: dict[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.chances = list(chances)
        self.overhead = 0.3
        self.pace = 1.0
        self._draw = random.Random(seed)
        self._steps = ModelDrafts(costs_of(STEPS))
        self._drafts = ModelDrafts(costs_of(drafts)) if drafts else None
        self._kv = KVCache(100_000, 16)
        self._num_requests = 0
        self._rows = [self._new_row(self._draw.randrange(ANSWER)) for _ in range(num_rows)]
        self._in_flight: deque[tuple[ScheduleBatch, StepResult]] = deque()

    def run(self, num_steps: int) -> tuple[float, float]:
        """Run steps.

        Returns:
            Tokens per second over those without guesses, and the share of steps with guesses.
        """
        plain_s = took_s = 0.0
        num_guessing = 0
        for _ in range(num_steps):
            batch = self.plan()
            guessed = self._guess(batch)
            seconds = self.pace * self._seconds_of(batch, guessed)
            num_right = sum(num_ids(row.token_ids) for row in guessed)
            each_s = self.pace * self._steps.round_s(batch.batch_size) / batch.batch_size
            plain_s += each_s * (batch.batch_size + num_right)
            took_s += seconds
            num_guessing += bool(guessed)
            noise = max(0.85, self._draw.gauss(1.0, 0.1))
            if self._draw.random() < 0.02:
                noise *= 3.0
            result = StepResult(0, b"", 1.0, 1.0 + noise * seconds, guessed=guessed)
            self._in_flight.append((batch, result))
            if len(self._in_flight) > 1:
                self.policy.observe(*self._in_flight.popleft())
        return plain_s / took_s, num_guessing / num_steps

    def plan(self) -> ScheduleBatch:
        """Return the next step, with new requests in place of those that have ended."""
        batch = ScheduleBatch()
        for index, row in enumerate(self._rows):
            if row.num_steps == 0:
                self._rows[index] = row = self._new_row(ANSWER)
            row.num_steps -= 1
            request = row.request
            request.num_computed_tokens, request.num_known_tokens = 3, 4
            if not request.pages:
                self._kv.append_page(request)
            batch.add_decodes([request])
        self.policy.plan(batch, self._kv)
        return batch

    def _new_row(self, num_steps: int) -> GuessingRow:
        self._num_requests += 1
        request = request_of(self._num_requests, 100_000)
        return GuessingRow(request, self._draw.choice(self.chances), num_steps)

    def _guess(self, batch: ScheduleBatch) -> list[GuessedRow]:
        guessed = []
        for row, count in enumerate(batch.num_guesses or []):
            chance, num_right = self._rows[row].chance, 0
            while num_right < count and self._draw.random() < chance:
                num_right += 1
            if count:
                guessed.append(GuessedRow(row, count, pack_ids([1] * num_right)))
        return guessed

    def _seconds_of(self, batch: ScheduleBatch, guessed: list[GuessedRow]) -> float:
        counts = [row.num_guesses for row in guessed]
        seconds = self._steps.round_s(batch.batch_size + sum(counts))
        if counts:
            seconds += self.overhead
        if self._drafts:
            for place in range(max(counts, default=0)):
                seconds += self._drafts.round_s(sum(count > place for count in counts))
        return seconds


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("chance", [0.0, 0.15, 0.4])
def test_guesses_that_looked_free_end_where_they_lose(num_rows: int, chance: float) -> None:
    worker = GuessingWorker(policy_of(), num_rows, [chance])
    worker.overhead = 4.0
    gain, _ = worker.run(1500)
    assert gain > 0.98
    gain, share = worker.run(500)
    assert gain > 0.985
    assert share < 0.2 or gain > 1.0


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_drafts_that_take_twice_the_measured_time_end_where_they_lose(num_rows: int) -> None:
    worker = GuessingWorker(policy_of(drafts=DRAFTS, factor=0.5), num_rows, [0.3, 0.5], DRAFTS)
    gain, _ = worker.run(1500)
    assert gain > 0.98
    assert worker.run(500)[1] < 0.2


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.4])
@pytest.mark.parametrize(("num_rows", "least"), [(1, 1.12), (2, 1.15), (4, 1.05)])
def test_right_drafts_go_on_whatever_was_measured(
    num_rows: int, least: float, factor: float
) -> None:
    policy = policy_of(drafts=DRAFTS, factor=factor)
    worker = GuessingWorker(policy, num_rows, [0.75, 0.85, 0.95], DRAFTS)
    worker.run(1000)
    assert worker.run(1000)[0] > least


def test_guessing_ends_and_begins_again_with_what_is_guessed() -> None:
    worker = GuessingWorker(policy_of(), 4, [0.05])
    worker.overhead = 4.0
    worker.run(1000)
    for _ in range(2):
        worker.chances = [0.9]
        worker.run(2 * ANSWER + 300)
        gain, share = worker.run(300)
        assert gain > 1.25
        assert share > 0.8
        worker.chances = [0.05]
        worker.run(2 * ANSWER + 100)
        gain, share = worker.run(300)
        assert gain > 0.98
        assert share < 0.2


def test_a_machine_that_becomes_slower_does_not_end_guesses_that_are_right() -> None:
    worker = GuessingWorker(policy_of(), 2, [0.8])
    worker.run(300)
    for worker.pace in (2.0, 1.0, 1.5):
        worker.run(300)
        assert worker.run(300)[1] > 0.8


def test_the_loss_of_guesses_is_bounded_by_the_account_and_a_share_of_the_other_steps() -> None:
    trial, lost, num_plain = GuessTrial(4), 0.0, 0
    for _ in range(5000):
        if trial.may_guess():
            lost += 0.3
            trial.observe_guesses(4, 0.0, 1.3, 0.0)
        else:
            num_plain += 1
            trial.observe_plain(1.0)
    assert 0.0 < lost < 3.0 + 0.01 * num_plain


def test_no_step_has_guesses_before_some_have_none_and_an_empty_account_waits() -> None:
    trial = GuessTrial(1)
    assert not trial.may_guess()
    for _ in range(MIN_PLAIN):
        trial.observe_plain(1.0)
    assert trial.may_guess()
    for _ in range(20):
        trial.observe_guesses(1, 0.0, 2.0, 0.0)
    waited = 0
    while not trial.may_guess():
        trial.observe_plain(1.0)
        waited += 1
    assert waited > RESUME * 100


def test_the_cost_of_guesses_follows_what_they_add_and_is_tried_again_later() -> None:
    trial = GuessTrial(2)
    for _ in range(MIN_PLAIN):
        trial.observe_plain(3.0)
    for _ in range(200):
        trial.observe_guesses(2, 1.0, 3.0 * 1.7, 3.0 * 0.2)
    assert trial.added.steps(2) == pytest.approx(0.5, rel=0.15)
    for _ in range(4000):
        trial.observe_plain(3.0)
    assert trial.added.steps(2) < 0.1


def test_a_round_of_drafts_is_filled_before_the_next_one() -> None:
    policy = policy_of(drafts=DRAFTS)
    worker = GuessingWorker(policy, 4, [0.85], DRAFTS)
    worker.run(200)
    numbers = [plan for _ in range(40) if (plan := worker.plan().num_guesses)]
    assert numbers
    assert all(max(plan) - min(plan) <= 1 for plan in numbers)


def test_a_new_request_is_judged_by_the_guesses_of_others_until_those_are_old() -> None:
    policy = policy_of(drafts=DRAFTS)
    policy.observe(*step_of_one_row())
    requests = [request_of(number) for number in range(20)]

    def rate_of_a_new_one() -> float:
        request = request_of(99)
        policy.observe(*step_of_one_row(request, GuessedRow(0, 1, b"")))
        assert request.guess_record is not None
        return request.guess_record.rate

    assert rate_of_a_new_one() > 0.4
    for request in requests:
        policy.observe(*step_of_one_row(request, GuessedRow(0, 1, b"")))
    assert rate_of_a_new_one() < 0.2
    for _ in range(1000):
        policy.observe(*step_of_one_row())
    assert rate_of_a_new_one() > 0.4


def step_of_one_row(
    request: Request | None = None, *guessed: GuessedRow
) -> tuple[ScheduleBatch, StepResult]:
    """Return a step of one row, and its result."""
    batch = ScheduleBatch(requests=[request or request_of(0)], num_tokens=[1], num_decodes=1)
    return batch, StepResult(0, b"", 1.0, 2.0, guessed=list(guessed))
