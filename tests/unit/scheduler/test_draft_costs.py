"""Drafts of the model itself are planned by the seconds of the steps that make them."""

import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DraftCost, GuessedRow, StepResult
from scheduler_proc.planning.speculation import (
    GuessPolicy,
    ModelDrafts,
    all_rounds_s,
    make_guess_policy,
    one_more_s,
)
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.request import Request
from tests.unit.scheduler.requests import observe_plain, planned, request_of


def policy_of(draft_s: float) -> GuessPolicy:
    """Return a policy that has seen steps of one row without drafts."""
    drafts = [DraftCost(1, draft_s), DraftCost(64, 8 * draft_s)]
    policy = make_guess_policy(SchedulerArgs(speculative_method="self"), True, drafts)
    assert policy is not None
    observe_plain(policy, 1)
    return policy


def observe(
    policy: GuessPolicy, request: Request, num_drafts: int, num_right: int, draft_s: float
) -> None:
    """Let a row have drafts in 20 steps, of which the first ones were right."""
    row = GuessedRow(0, num_drafts, pack_ids([1] * num_right))
    for _ in range(20):
        batch = ScheduleBatch(requests=[request], num_tokens=[1], num_decodes=1)
        took_s = 1.1 + num_drafts * draft_s
        policy.observe(batch, StepResult(0, b"", 1.0, 1.0 + took_s, guessed=[row]))


def test_a_round_costs_a_step_and_a_further_row_the_difference() -> None:
    costs = ModelDrafts([DraftCost(1, 0.4), DraftCost(5, 0.8)])
    assert costs.round_s(0) == 0.0
    assert one_more_s(costs, 0) == pytest.approx(0.4)
    assert one_more_s(costs, 1) == pytest.approx(0.1)
    assert all_rounds_s(costs, [3, 1, 0]) == pytest.approx(0.5 + 0.4 + 0.4)
    assert all_rounds_s(costs, []) == 0.0


def test_cheap_drafts_are_more_than_dear_ones_and_drafts_as_dear_as_steps_are_none() -> None:
    numbers = []
    for draft_s in (0.05, 0.3, 1.0):
        policy, request = policy_of(draft_s), request_of(0)
        observe(policy, request, 4, 4, draft_s)
        observe(policy, request, 4, 3, draft_s)
        (number,) = planned(policy, [request]) or [0]
        numbers.append(number)
    assert numbers[0] > numbers[1] > 1
    assert numbers[2] == 0


def test_a_new_request_drafts_at_once_where_a_draft_is_cheap() -> None:
    policy = policy_of(0.3)
    observe(policy, request_of(0), 2, 2, 0.3)
    (number,) = planned(policy, [request_of(1)]) or [0]
    assert number >= 2


def test_nothing_is_drafted_where_a_token_costs_its_full_share() -> None:
    requests = [request_of(number) for number in range(24)]
    assert not any(planned(policy_of(0.3), requests) or [])
