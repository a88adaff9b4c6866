"""The expected time of steps, and --itl-target, which bounds it."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.worker import StepResult
from scheduler_proc.planning.step_cost import MAX_RATIO, StepCosts
from scheduler_proc.state.batch import ScheduleBatch
from simulator import cost_model
from simulator.clock import START
from simulator.trace import TraceRequest
from simulator.world import World as SimulatedServer
from tests.unit.scheduler.requests import request_of_tokens
from tests.unit.simulation import World, reference, submit

STEP_S, ROW_S, TOKEN_S, PAIR_S = 0.009, 0.0002, 0.0006, 3e-7


def batch_of(num_decodes: int, num_prompt_tokens: int, context: int = 0) -> ScheduleBatch:
    batch = ScheduleBatch()
    for _ in range(num_decodes):
        batch.requests.append(request_of_tokens([9]))
        batch.num_tokens.append(1)
    batch.num_decodes = num_decodes
    if num_prompt_tokens:
        request = request_of_tokens([9] * (context + num_prompt_tokens))
        request.num_computed_tokens = context
        batch.add_prefill(request, num_prompt_tokens)
    return batch


def true_seconds(batch: ScheduleBatch) -> float:
    rows, tokens = batch.num_decodes, batch.num_prompt_tokens
    return STEP_S + rows * ROW_S + tokens * TOKEN_S + batch.num_pairs * PAIR_S


def result(seconds: float) -> StepResult:
    return StepResult(0, b"", 1.0, 1.0 + seconds)


def expected(model: StepCosts, batch: ScheduleBatch) -> float:
    return model.seconds(batch.num_decodes, batch.num_prompt_tokens, batch.num_pairs)


def learned(noise: float, num_steps: int = 300) -> StepCosts:
    source, model = random.Random(1), StepCosts()
    for number in range(num_steps):
        tokens = source.choice([0, 0, 16, 64, 128])
        batch = batch_of(source.randint(1, 32), tokens, number % 60 * 100)
        model.observe(batch, result(true_seconds(batch) * source.uniform(1 - noise, 1 + noise)))
    return model


@pytest.mark.parametrize(("noise", "limit"), [(0.0, 0.1), (0.1, 0.25)])
def test_the_time_of_a_step_is_learned_from_those_that_ran(noise: float, limit: float) -> None:
    model = learned(noise)
    for batch in (batch_of(8, 0), batch_of(8, 64), batch_of(20, 128, 3000), batch_of(1, 16, 5000)):
        assert expected(model, batch) == pytest.approx(true_seconds(batch), rel=limit)


def test_the_tokens_of_a_time_take_that_time() -> None:
    model = learned(0.0)
    for context in (0, 1000, 5000):
        count = model.tokens_within(0.04, context)
        more = expected(model, batch_of(4, count, context)) - model.seconds(4)
        assert 0.035 < more <= 0.0401
    assert model.tokens_within(0.04, 5000) < model.tokens_within(0.04, 0)
    assert model.tokens_within(0.0, 0) == model.tokens_within(-1.0, 0) == 0


def test_a_disturbed_step_changes_little() -> None:
    model, batch = learned(0.0), batch_of(8, 64)
    before = expected(model, batch)
    model.observe(batch, result(100 * before))
    assert expected(model, batch) < MAX_RATIO * before


def test_prices_follow_a_machine_that_becomes_slower() -> None:
    model, batch = learned(0.0), batch_of(8, 64)
    for _ in range(20):
        model.observe(batch, result(1.8 * true_seconds(batch)))
    assert expected(model, batch) == pytest.approx(1.8 * true_seconds(batch), rel=0.05)


def served(**flags: Any) -> SimulatedServer:
    """Serve a stream, and a prompt of 6,000 tokens that arrives while it runs."""
    config = ServerConfig().replace(**flags)
    server = SimulatedServer(config, cost_model.load(cost_model.DEFAULT), 4096)
    stream, warm = TraceRequest(0.0, ((0, 32),), 400), TraceRequest(1.0, ((1, 300),), 4)
    server.run(enumerate([stream, warm, TraceRequest(2.0, ((2, 6000),), 4)]))
    assert not server.records.errors
    return server


@pytest.mark.parametrize(
    ("target", "mode"), [(40.0, "mixed"), (80.0, "mixed"), (160.0, "mixed"), (80.0, "alternate")]
)
def test_a_running_stream_gets_its_tokens_in_time_beside_a_long_prompt(
    target: float, mode: str
) -> None:
    gaps = served(itl_target=target, batch_mode=mode).records.gaps.values * 1000
    assert np.percentile(gaps, 98) <= target
    assert gaps.max() > 0.6 * target, "the steps are far below the target"


def test_without_a_target_its_steps_take_longer() -> None:
    gaps = served().records.gaps.values * 1000
    assert np.percentile(gaps, 99) > 160


def test_a_prompt_goes_on_under_a_target_that_no_step_can_keep() -> None:
    server = served(itl_target=0.001)
    assert (server.records["completion_tokens"] > 0).all()
    assert server.records["finished"].max() < START + 60


def test_short_prompts_pass_a_long_one_under_a_target_that_no_step_can_keep() -> None:
    world = World(SchedulerArgs(chunked_prefill_size=64, itl_target=1.0), 256)
    world.send(submit("before", [7] * 80, 1))  # a step is measured: it takes ten times as long
    world.run()
    world.send(submit("long", [9] * 600, 1))
    world.step()
    world.send(*(submit(f"short{i}", [8 - i] * 16, 1) for i in range(4)))
    world.run()
    assert list(world.detok.closed) == ["before", *(f"short{i}" for i in range(4)), "long"]
    assert len(world.worker.tokens_of_steps) < 600 // 16 + 12, "no step is smaller than it must be"


def tokens_of_longest_step(*others: Submit, moves_on: bool) -> int:
    """Return the tokens of the longest step in which a prompt of 2,000 has a part."""
    world = World(SchedulerArgs(itl_target=1.0), 1024, prefill_tokens=512)
    world.send(submit("before", [7] * 80, 1))  # steps are measured
    world.run()
    world.send(*others)
    for _ in range(20):
        world.step()
    first = len(world.worker.tokens_of_steps)
    world.send(submit("long", [9] * 2000, 2, moves_on=moves_on))
    world.run()
    return max(map(sum, world.worker.tokens_of_steps[first:]))


def test_a_prompt_for_another_replica_has_longer_steps_where_no_stream_stays() -> None:
    stream = submit("stream", [8] * 8, 400, ignore_eos=True)
    leaving = msgspec.structs.replace(stream, moves_on=True)
    assert tokens_of_longest_step(moves_on=False) <= 20
    assert tokens_of_longest_step(moves_on=True) > 60
    assert tokens_of_longest_step(stream, moves_on=True) <= 20, "its tokens are due"
    assert tokens_of_longest_step(leaving, moves_on=True) <= 20, "it has not left"


def test_answers_are_the_same_with_a_target() -> None:
    world = World(SchedulerArgs(chunked_prefill_size=32, itl_target=1.0), 256)
    prompts = {f"r{i}": [9 + i] * (4 + 30 * i) for i in range(6)}
    world.send(*(submit(name, prompt, 6) for name, prompt in prompts.items()))
    world.run()
    for name, prompt in prompts.items():
        assert world.detok.tokens[name] == reference(prompt, 6, False)


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan")])
def test_a_target_must_be_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="itl_target"):
        SchedulerArgs(itl_target=value).validate()
