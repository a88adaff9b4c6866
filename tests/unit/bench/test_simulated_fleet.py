"""Replicas of a simulation that are lost, come back, and follow the load."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.simulate import __main__ as command
from cluster_proc.scaling import Scaling, ScalingLimits
from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import AUTO, BY_CACHE
from quadriga.server.config.server_config import ServerConfig
from simulator import cost_model
from simulator.fleet import Loss
from simulator.latency import Slo
from simulator.report import Figures, figures
from simulator.trace import TraceRequest
from simulator.world import World
from tests.unit.bench.simulated_requests import MODEL, PAGE, request, requests


def world_of(replicas: int, **flags: Any) -> World:
    config = ServerConfig().replace(page_size=PAGE, max_batch_size=8)
    return World(config, MODEL, 1000, replicas, BY_CACHE, **flags)


def run(world: World, sent: list[TraceRequest]) -> Figures:
    world.run(enumerate(sent))
    for replica in world.replicas:
        replica.scheduler.check()
        assert replica.load.pages_held == 0
    loads = world.dispatcher.router.ledger.loads if world.dispatcher else []
    assert all(load.num_open == load.num_prefill_tokens == 0 for load in loads)
    found = figures(world, MODEL.delays_ms.delivery, Slo(), wall=1.0)
    assert found.failed == 0
    assert found.completion_tokens == sum(one.max_new_tokens for one in sent)
    return found


@pytest.mark.parametrize("return_after", [None, 0.5])
def test_no_token_is_lost_or_doubled_with_lost_replicas(return_after: float | None) -> None:
    world = world_of(4)
    world.lose(Loss(2, 1.0), return_after)
    found = run(world, requests(300, request_rate=60.0))
    assert found.fleet is not None
    assert found.fleet.num_lost == 2
    assert found.fleet.num_moved > 0 and found.fleet.num_computed_again > 0
    assert len(world.replicas) == (2 if return_after is None else 4)
    assert found.fleet.replicas_min == 2


def streams_beside_prompts(count: int = 3) -> list[TraceRequest]:
    """Return streams of short prompts, and a long prompt every second."""
    streams = [request(at=n / 100, output=200, segment=n) for n in range(8)]
    prompts = [request(at=1.0 + n, prompt=200, segment=100 + n) for n in range(count)]
    return [*streams, *prompts]


def test_streams_do_not_wait_for_prompts_that_are_computed_apart() -> None:
    mixed, apart = world_of(2), world_of(2, prefill_replicas=1)
    before = run(mixed, streams_beside_prompts())
    found = run(apart, streams_beside_prompts())
    assert before.itl is not None and found.itl is not None
    assert before.itl.max > 200, "a step computes a whole prompt"
    assert found.itl.max < before.itl.max / 3
    assert apart.fleet.counts.num_handed_over == 3
    assert found.cached_tokens == 0, "a page that another replica has computed is no hit"


@pytest.mark.parametrize("num_prefill", [1, 2])
def test_no_token_is_lost_or_doubled_where_replicas_with_roles_are_lost(num_prefill: int) -> None:
    world = world_of(4, prefill_replicas=num_prefill)
    world.lose(Loss(3, 1.0), 1.0)
    sent = [
        request(at=n / 40, prompt=20 + 60 * (n % 3), output=1 + n % 30, segment=n)
        for n in range(200)
    ]
    found = run(world, sent)
    assert found.fleet is not None and found.fleet.num_lost == 3
    assert world.fleet.counts.num_handed_over > 0


def test_roles_follow_the_load_and_no_token_is_lost_or_doubled() -> None:
    world = world_of(4, prefill_replicas=AUTO)
    long = [request(at=n / 10, prompt=200, output=30, segment=n) for n in range(600)]
    later = [request(at=60 + n / 4, output=8, segment=1000 + n) for n in range(300)]
    run(world, [*long, *later])
    counts = world.fleet.counts
    assert counts.num_handed_over > 50 and 2 <= counts.num_role_changes <= 6
    assert world.dispatcher is not None and world.dispatcher.router.num_prefill == 0


def test_pages_that_move_slowly_stay_where_they_are() -> None:
    world = world_of(4, prefill_replicas=AUTO, copy_share=100.0)
    run(world, [request(at=n / 10, prompt=200, output=30, segment=n) for n in range(600)])
    assert world.dispatcher is not None and world.dispatcher.router.num_prefill == 0
    assert world.fleet.counts.num_role_changes <= 2


def test_requests_wait_for_a_replica_where_there_is_none() -> None:
    world = world_of(2)
    world.lose(Loss(2, 1.0), 5.0)
    found = run(world, requests(60, request_rate=20.0))
    assert found.ttft is not None and found.ttft.max > 4000


def test_replicas_come_under_a_load_and_leave_after_it() -> None:
    world = world_of(1, max_replicas=3)
    world.fleet.follow_load(Scaling(ScalingLimits(1, 3, 4, 1.0, 5.0), 1), start_s=2.0)
    burst = [request(at=n / 20, output=20, segment=n) for n in range(400)]
    found = run(world, [*burst, request(at=60.0, segment=400)])
    assert found.fleet is not None
    assert (found.fleet.replicas_min, found.fleet.replicas_max) == (1, 3)
    assert found.fleet.num_left >= 2 and found.fleet.num_lost == 0
    assert len(world.replicas) == 1


def test_the_ideal_cache_is_a_bound_of_the_hits() -> None:
    found = run(world_of(4), requests(200, prefix_groups=8, prefix_len=64, request_rate=30.0))
    assert found.routing is not None
    assert found.routing.ideal_cached_tokens == (200 - 8) * 64, "all but the first of each group"
    assert 0 < found.cached_tokens <= found.routing.ideal_cached_tokens


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--replicas 4 --lose 4@1", "one has to stay"),
        ("--replicas 2 --prefill-replicas 2", "one replica must be left"),
        ("--replicas 4 --lose some", "--lose is 'some': give COUNT@SECONDS"),
        ("--replicas 4 --lose 0@1", "--lose is '0@1'"),
        ("--replicas 4 --return-after 5", "--return-after works with --lose only"),
        (
            "--replicas 4 --lose 1@1 --return-after -1",
            "--return-after must be 0 or more (it is -1.0)",
        ),
        ("--scale 1:2 --target-ongoing-requests 0", "target_ongoing_requests must be positive"),
        ("--scale 1:2 --replica-start nan", "--replica-start must be 0 or more (it is nan)"),
        ("--scale 3:2", "--scale is '3:2': give MIN:MAX"),
        ("--replicas 9 --scale 1:2", "--replicas 9 is not within --scale 1:2"),
    ],
)
def test_flags_that_cannot_work_are_named(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cost_model.save(tmp_path / "model.json", MODEL)
    assert command.main(["--cost-model", str(tmp_path / "model.json"), *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_loss_is_read() -> None:
    assert Loss.parse("100@20") == Loss(100, 20.0)
    with pytest.raises(ConfigError):
        Loss.parse("1@nan")


def test_variants_of_one_load_are_rows_of_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--replicas", "2", "--num-requests", "20", "--request-rate", "20"]
    flags += ["--goodput", "ttft:100"]
    vary = ["--vary", "all: ", "--vary", "few: --max-running-requests 1", "--json"]
    assert command.main([*flags, *vary, str(tmp_path / "rows")]) == 0
    printed = capsys.readouterr().out
    assert "2 replicas, 20 requests, ttft:100" in printed
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row[""] for row in rows] == ["all", "few"]
    assert rows[0]["goodput, %"] > rows[1]["goodput, %"]
