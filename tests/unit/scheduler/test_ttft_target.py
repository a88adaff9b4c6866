"""Targets of the first token: the order that they make, and refusals of what cannot be met."""

from typing import Any

import msgspec
import numpy as np
import pytest

from bench.scenarios import SHORT_INPUT, long_among_short
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.state.request import DEFAULT_TTFT_TARGET_S
from simulator import cost_model
from simulator.trace import TraceRequest
from simulator.world import World as SimulatedServer
from tests.unit.simulation import STEP_S, World, reference, submit


def wanted(
    name: str, prompt: list[int], target_s: float | None, at: float = 1000.0, **fields: Any
) -> Submit:
    """Return a request that wants its first token within `target_s` seconds of its arrival."""
    message = submit(name, prompt, 1, ignore_eos=True, **fields)
    params = msgspec.structs.replace(message.params, ttft_target=target_s)
    return msgspec.structs.replace(message, params=params, received_at=at, tokenized_at=at)


def one_slot(**flags: Any) -> World:
    """Return a server that runs one request, which is there."""
    world = World(SchedulerArgs(max_running_requests=1, **flags), 256)
    world.send(submit("running", [5], 8, ignore_eos=True))
    world.step()
    return world


def order(world: World, *messages: Submit) -> list[str]:
    world.send(*messages)
    world.run()
    return list(world.detok.closed)[1:]


def test_the_request_that_is_due_first_is_admitted_first() -> None:
    world = one_slot()
    ended = order(
        world,
        wanted("none", [9], None),
        wanted("later", [8], 3.0),
        wanted("soon", [7], 1.0),
        wanted("patient", [6], 60.0),
    )
    assert ended == ["soon", "later", "none", "patient"]


def test_without_targets_the_order_is_that_of_arrival() -> None:
    ended = order(one_slot(), *(wanted(f"r{i}", [9 - i], None) for i in range(5)))
    assert ended == [f"r{i}" for i in range(5)]


def test_a_request_without_a_target_is_passed_for_some_seconds_only() -> None:
    late = 1000.0 + DEFAULT_TTFT_TARGET_S
    world = one_slot()
    before, after = wanted("before", [8], 1.0, late - 1.1), wanted("after", [7], 1.0, late)
    assert order(world, wanted("none", [9], None), after, before) == ["before", "none", "after"]


def test_deadlines_are_targets() -> None:
    ended = order(
        one_slot(),
        wanted("none", [9], None),
        wanted("ends", [8], None, deadline=1002.0),
        wanted("admitted", [7], None, queue_deadline=1001.0),
    )
    assert ended == ["admitted", "ends", "none"]


def test_priorities_go_before_targets() -> None:
    ended = order(
        one_slot(schedule_policy="priority"),
        wanted("soon", [9], 1.0),
        wanted("urgent", [8], 4.0, priority=1),
        wanted("sooner and urgent", [7], 2.0, priority=1),
    )
    assert ended == ["sooner and urgent", "urgent", "soon"]


@pytest.mark.parametrize(("target_s", "is_beside"), [(2.0, True), (None, False)])
def test_a_prompt_that_is_due_sooner_begins_beside_one_that_has_less_left(
    target_s: float | None, is_beside: bool
) -> None:
    world = World(SchedulerArgs(chunked_prefill_size=16), 256)
    world.send(submit("patient", [9] * 100, 1, ignore_eos=True))
    world.step()
    world.send(wanted("other", [8] * 140, target_s))
    world.step()
    world.step()
    assert (world.scheduler.lifecycle.core.num_waiting == 0) == is_beside
    world.run()
    assert world.detok.tokens["other"] == reference([8] * 140, 1, True)


def measured_world(**flags: Any) -> World:
    """Return an idle server that knows what prompts cost: each step takes STEP_S."""
    world = World(SchedulerArgs(chunked_prefill_size=16, **flags), 512)
    for number in range(6):
        world.send(submit(f"before{number}", [9 + number] * 32, 2, ignore_eos=True))
        world.run()
    return world


def refusal_of(world: World, message: Submit) -> Any:
    world.send(message)
    end = world.detok.closed.get(message.request_id)
    return None if end is None else end.error


def test_a_prompt_that_takes_longer_than_its_target_is_refused_with_both() -> None:
    world = measured_world()
    error = refusal_of(world, wanted("long", [80] * 1600, 5 * STEP_S, world.worker.now))
    assert (error.code, error.field) == ("invalid_request", "ttft_target")
    assert error.message.startswith("ttft_target is 0.05 s, and 1600 prompt tokens that are not")
    assert "allow more, or shorten the prompt" in error.message


def test_only_requests_that_are_due_earlier_count() -> None:
    world = measured_world()
    now = world.worker.now
    world.send(*(wanted(f"r{i}", [20 + i] * 160, 4.0, now) for i in range(10)))
    assert refusal_of(world, wanted("first", [80] * 16, 0.2, now)) is None
    error = refusal_of(world, wanted("behind", [82] * 160, 0.6, now + 3.5))
    assert error.code == "queue_full"
    assert "waiting requests go first" in error.message


def test_a_target_that_the_slots_make_impossible_is_refused_with_the_expected_time() -> None:
    slow = World(SchedulerArgs(chunked_prefill_size=16, max_running_requests=1), 512)
    slow.send(submit("first", [9] * 32, 4, ignore_eos=True))
    slow.run()
    slow.send(submit("running", [8] * 32, 400, ignore_eos=True))
    for _ in range(4):
        slow.step()
    error = refusal_of(slow, wanted("waits", [7] * 16, 0.5, slow.worker.now))
    assert error.code == "queue_full"
    assert error.message.startswith("ttft_target is 0.5 s, and the first token is expected after")
    assert "1 run; allow more, or try again in" in error.message
    assert 1 < error.retry_after < 5


def test_a_request_that_was_accepted_before_is_not_refused() -> None:
    world = measured_world()
    message = wanted("long", [80] * 1600, STEP_S, world.worker.now)
    assert refusal_of(world, msgspec.structs.replace(message, frontend_retry=True)) is None
    world.run()
    assert world.detok.tokens["long"] == reference([80] * 1600, 1, True)


def test_cached_tokens_count_as_computed() -> None:
    world = measured_world()
    prompt = [30 + i % 50 for i in range(800)]
    world.send(submit("before", prompt, 1, ignore_eos=True))
    world.run()
    assert refusal_of(world, wanted("again", [*prompt, 3], 5 * STEP_S, world.worker.now)) is None
    world.run()
    assert world.detok.closed["again"].finish_reason == "length"


def served(target_s: float, rate: float) -> tuple[SimulatedServer, list[TraceRequest]]:
    """Serve short prompts that have a target among long ones, with the costs of a real machine."""
    requests = [
        msgspec.structs.replace(request, ttft_target=target_s) if is_short(request) else request
        for request in long_among_short(400, rate, 4)
    ]
    config = ServerConfig().replace(itl_target=60.0)
    server = SimulatedServer(config, cost_model.load(cost_model.DEFAULT), 4096)
    server.run(enumerate(requests))
    return server, requests


def is_short(request: TraceRequest) -> bool:
    return request.num_own_tokens <= SHORT_INPUT.high


def test_what_is_accepted_is_met_and_what_is_refused_would_not_have_been() -> None:
    server, requests = served(0.25, 4.0)
    records = server.records
    ttft = records["first_token"] - records["submitted"]
    short = np.array([is_short(request) for request in requests])
    accepted = short & (ttft > 0)
    assert set(records.errors.values()) <= {"queue_full"}
    assert accepted.sum() > 0.97 * short.sum(), "nearly all could be met"
    assert (ttft[accepted] <= 0.25).mean() > 0.97
    strict, _ = served(0.012, 4.0)
    assert set(strict.records.errors.values()) >= {"invalid_request"}
