"""The counters of the scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.to_scheduler import CLIENT_LOST, AbortAll, AbortRequest
from quadriga.wire.worker import StepResult
from scheduler_proc.observe.stats import RECENT_STEPS, SchedulerStats
from scheduler_proc.state.batch import ScheduleBatch, StepUpdate
from scheduler_proc.state.request import FinishReason
from tests.unit.simulation import World, abort, submit


def test_the_gap_before_a_step_counts_where_its_plan_was_there() -> None:
    stats = SchedulerStats()
    for step, (planned_before, gap) in enumerate([(0.5, 0.001), (0.5, 0.001), (-0.5, 0.5)], 1000):
        batch = ScheduleBatch(planned_at=step - planned_before, num_decodes=1)
        stats.on_step(batch, StepResult(step, b"", step + gap, step + 1.0), StepUpdate())
    info = stats.info()
    assert info["step_gap_ms_p50"] == info["step_gap_ms_p99"] == pytest.approx(1)
    assert (
        info["late_plans"] == 2
    )  # the first step, which could not be planned before, and the last


def test_steps_are_counted_by_how_many_tokens_they_have() -> None:
    stats = SchedulerStats()
    for step, rows in enumerate([[1], [1] * 8, [1, 20], [20_000]]):
        batch = ScheduleBatch(planned_at=step, num_tokens=rows)
        stats.on_step(batch, StepResult(step, b"", step, step + 1.0), StepUpdate())
    info: Any = stats.info()
    counts = {bound: info["step_tokens"][bound] for bound in ("1", "8", "16", "32", "+Inf")}
    assert counts == {"1": 1, "8": 2, "16": 2, "32": 3, "+Inf": 4}
    assert info["step_tokens"]["sum"] == 1 + 8 + 21 + 20_000


def test_a_request_counts_in_the_stages_that_it_passed() -> None:
    stats, names = (
        SchedulerStats(),
        ("received_at", "tokenized_at", "admitted_at", "first_token_at"),
    )
    for passed in range(5):
        stamps = [100.0, 100.25, 102.25, 103.25]
        times = dict(zip(names, [*stamps[:passed], *[0.0] * (4 - passed)], strict=True))
        ended = SimpleNamespace(finish_reason=FinishReason.ABORT, tenant="", **times)
        stats.on_finish(ended, 110.0)  # type: ignore[arg-type]
    stages: Any = stats.info()["stage_seconds"]
    assert {stage: times["+Inf"] for stage, times in stages.items()} == {
        "tokenize": 4, "queue": 3, "prefill": 2, "decode": 1,
    }  # fmt: skip
    assert stages["decode"]["sum"] == 6.75 and stages["decode"]["5"] == 0


def test_aborts_are_counted_by_their_origin() -> None:
    world = World(SchedulerArgs(max_queued_requests=4))
    names = ("asked", "lost", "stopped", "ran", "too many")
    world.send(*(submit(name, [9], 4, ignore_eos=True) for name in names))
    world.send(abort("asked"), abort("asked"), abort("unknown"))
    world.send(AbortRequest(b"c", "lost", CLIENT_LOST))
    world.send(AbortAll("it is late"))
    info = world.scheduler.info()
    assert info["aborts"] == {"client": 1, "client_lost": 1, "server_stopping": 2}
    assert info["errors"] == {"queue_full": 1}
    assert info["ended"] == {"stop": 0, "length": 0, "abort": 4, "error": 1}


def test_gaps_of_long_ago_are_forgotten() -> None:
    stats = SchedulerStats()
    for step in range(2 * RECENT_STEPS):
        gap = 0.003 if step < RECENT_STEPS else 0.001
        result = StepResult(step, b"", step + gap, step + 1.0)
        stats.on_step(ScheduleBatch(planned_at=step - 0.5), result, StepUpdate())
    assert stats.info()["step_gap_ms_p99"] == pytest.approx(1)
