"""How many tokens are guessed: as many as pay, and none where a step has many rows."""

import itertools
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import GuessedRow, StepResult
from scheduler_proc.journal.events import StepEvents
from scheduler_proc.observe.stats import GuessStats
from scheduler_proc.planning.speculation import (
    MAX_GUESSING_TOKENS,
    MIN_STEPS,
    PRIOR_STEPS,
    AddedTime,
    GuessPolicy,
    make_guess_policy,
)
from scheduler_proc.state.batch import ScheduleBatch, StepUpdate
from scheduler_proc.state.kv_cache import KVCache
from scheduler_proc.state.request import FIRST_PAUSE, MAX_PAUSE, GuessRecord, Request
from tests.unit.scheduler.requests import PROMPT, batch_of, observe_plain, planned, request_of
from tests.unit.simulation import World, reference, submit

DEAR = 1.2  # steps that a guess adds, more than a step of its own


def policy_of(added: float = 0.0, **flags: Any) -> GuessPolicy:
    """Return a policy that has seen steps of one token and of two, with and without guesses.

    Args:
        added: what each guess added to the step of a second; 0.0: no step had one.
        flags: of the scheduler.
    """
    args = SchedulerArgs(**{"speculative_method": "auto", **flags})
    policy = make_guess_policy(args, can_guess=True)
    assert policy is not None
    for num_rows in (1, 2):
        observe_plain(policy, num_rows)
        for _ in range(30 if added else 0):
            policy._trials[num_rows].added.observe(num_rows, num_rows * added)
    return policy


def observe(policy: GuessPolicy, request: Request, num_guesses: int, num_right: int) -> None:
    batch = ScheduleBatch(requests=[request], num_tokens=[1], num_decodes=1)
    row = GuessedRow(0, num_guesses, pack_ids([1] * num_right))
    policy.observe(batch, StepResult(0, b"", 1.0, 2.0, guessed=[row]))


@pytest.mark.parametrize("number", [0, 64])
def test_a_number_of_guesses_that_cannot_work_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=r"it must be 1 to 63; --speculative-method none"):
        SchedulerArgs(num_speculative_tokens=number).validate()


def test_nothing_is_guessed_without_the_flag_or_a_worker_that_can() -> None:
    assert make_guess_policy(SchedulerArgs(speculative_method="none"), can_guess=True) is None
    assert make_guess_policy(SchedulerArgs(speculative_method="ngram"), can_guess=False) is None


def test_right_guesses_raise_the_number_and_wrong_ones_end_them() -> None:
    policy, good, bad = policy_of(), request_of(0), request_of(1)
    for _ in range(20):
        observe(policy, good, 8, 8)
        observe(policy, bad, 4, 0)
    kv, numbers = KVCache(1000, 16), None
    for _ in range(4):  # the first steps of two rows have few guesses
        batch = batch_of([good, bad], kv)
        policy.plan(batch, kv)
        numbers = batch.num_guesses
        guessed = [GuessedRow(0, numbers[0], pack_ids([1] * numbers[0]))] if numbers else []
        policy.observe(batch, StepResult(0, b"", 1.0, 2.0, guessed=guessed))
        for request in (good, bad):
            request.num_computed_tokens, request.num_known_tokens = 3, 4
    assert numbers is not None
    assert numbers[0] == SchedulerArgs().num_speculative_tokens
    assert numbers[1] <= 1


def test_nothing_is_guessed_where_a_token_costs_a_step() -> None:
    policy, request = policy_of(DEAR), request_of(0)
    request.guess_record = GuessRecord()
    request.guess_record.observe(8, 8)
    for _ in range(MAX_PAUSE):
        request.num_computed_tokens, request.num_known_tokens = 3, 4
        assert planned(policy, [request]) is None, "not even a try, which cannot pay"


def test_a_request_whose_guesses_were_wrong_tries_one_where_a_right_one_pays() -> None:
    policy, request = policy_of(0.2), request_of(0)
    request.guess_record = GuessRecord()
    for _ in range(30):
        request.guess_record.observe(8, 0)
    tries = []
    for number in range(2 * FIRST_PAUSE):
        request.num_computed_tokens, request.num_known_tokens = 3, 4
        if (numbers := planned(policy, [request])) is not None:
            assert numbers == [1]
            tries.append(number)
    first, second = tries
    assert second - first > FIRST_PAUSE


def test_nothing_is_guessed_under_load() -> None:
    policy = policy_of()
    observe_plain(policy, MAX_GUESSING_TOKENS)
    requests = [request_of(number) for number in range(MAX_GUESSING_TOKENS + 1)]
    assert sum(planned(policy, requests[:-1]) or []) > 0
    assert planned(policy, requests) is None
    by_flag = planned(policy_of(speculative_method="ngram"), requests)
    assert by_flag == [15] * len(requests)


def test_no_more_is_guessed_than_the_request_may_generate() -> None:
    policy = policy_of(speculative_method="ngram", num_speculative_tokens=5)
    assert planned(policy, [request_of(0, 4), request_of(1, 20), request_of(2, 2)]) == [2, 5, 0]


def test_guesses_take_no_page_that_others_may_need() -> None:
    policy = policy_of(speculative_method="ngram", num_speculative_tokens=20)
    for num_pages, expected in ((9, 7), (3, 2)):
        kv, requests = KVCache(num_pages, 4), [request_of(0)]
        assert planned(policy, requests, kv) == [20]
        assert len(requests[0].pages) == expected


def test_tries_become_rare_and_frequent_again() -> None:
    record, waits = GuessRecord(), []
    for _ in range(6):
        steps = 0
        while not record.may_try():
            steps += 1
        waits.append(steps)
    assert waits == [0, 16, 32, 64, 128, MAX_PAUSE]
    record.observe(1, 1)
    assert record.pause == FIRST_PAUSE


def test_what_guesses_add_is_first_assumed_then_learned_for_numbers_nearby_and_larger() -> None:
    added = AddedTime()
    assert added.steps(3) == pytest.approx(3 * PRIOR_STEPS)
    for _ in range(100):
        added.observe(3, 0.9)
    for number in (2, 3, 4):
        assert added.steps(number) == pytest.approx(0.3 * number, rel=0.15)
    assert added.steps(12) > 3.0, "as much more than assumed as the numbers below"
    assert added.steps(1) == pytest.approx(PRIOR_STEPS), "nothing is known of it"
    for _ in range(100):
        added.observe(12, 1.2)
    assert added.steps(12) == pytest.approx(1.2, rel=0.2)
    assert added.steps(3) == pytest.approx(0.9, rel=0.15)


def test_a_guess_is_never_free_and_a_larger_number_never_cheaper() -> None:
    added = AddedTime()
    for _ in range(100):
        added.observe(4, 0.8)
        added.observe(16, -0.3)
    assert added.min_steps() == pytest.approx(MIN_STEPS)
    steps = [added.steps(number) for number in range(100)]
    assert all(more - less > 0.99 * MIN_STEPS for less, more in itertools.pairwise(steps))


def test_counters_have_the_names_of_vllm() -> None:
    stats = GuessStats(3)
    guessed = [GuessedRow(0, 3, pack_ids([1, 2])), GuessedRow(2, 1, b"")]
    stats.on_step(StepResult(0, b"", 0.0, 1.0, guessed=guessed))
    assert stats.info() == {
        "spec_decode_num_drafts_total": 2,
        "spec_decode_num_draft_tokens_total": 4,
        "spec_decode_num_accepted_tokens_total": 2,
        "spec_decode_num_accepted_tokens_per_pos": {"0": 1, "1": 1, "2": 0},
    }


def test_logprobs_belong_to_the_tokens_of_a_row_in_order() -> None:
    message = submit("a", PROMPT, 9)
    with_logprobs = SamplingParams(max_new_tokens=9, seed=0, logprobs=0)
    message = type(message)(**{
        name: getattr(message, name) for name in message.__struct_fields__
    } | {"params": with_logprobs})  # fmt: skip
    request = Request.from_submit(7, message, frozenset())
    events = StepEvents()
    events.add_update(StepUpdate(seqs=[3, 7, 4, 7], token_ids=[1, 2, 3, 4]), 1.0)
    block = LogprobBlock(pack_ids([10, 20, 30]), 0, b"", b"")
    events.add_logprobs(SampledLogprobs(pack_ids([0, 0, 0]), block), [request])
    assert events.logprobs is not None
    assert events.logprobs.rows == pack_ids([1, 3, -1]), "the third token came after the end"
    assert [one.values for one in request.logprobs] == [pack_ids([10]), pack_ids([20])]


def test_an_answer_takes_fewer_steps_with_guesses() -> None:
    steps = {}
    for method in ("none", "ngram"):
        world = World(SchedulerArgs(speculative_method=method), can_guess=True)
        world.send(submit("a", PROMPT, 40, ignore_eos=True))
        steps[method] = world.run()
        assert world.detok.tokens["a"] == reference(PROMPT, 40, True)
    assert steps["ngram"] < steps["none"] / 2
