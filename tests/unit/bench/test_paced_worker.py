"""The worker that computes nothing."""

import time
from functools import partial

import pytest

from bench.paced_worker import STEP_MS_VARIABLE, PacedRunner, install, start
from quadriga import clock
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import NewSlot, StepPlan
from simulator.replica import SimulatedSlots
from worker_proc import main as worker_main

STEP_S = 0.02


def plan(step: int, num_tokens: int, new: list[NewSlot]) -> StepPlan:
    return StepPlan(step, 0, pack_ids([3]), pack_ids([num_tokens]), new, b"", session=7)


def test_a_step_takes_its_time_and_samples_where_all_known_tokens_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(clock, "now", lambda: 5.0)
    monkeypatch.setattr(time, "sleep", slept.append)
    runner = PacedRunner(SimulatedSlots(4, 1000), STEP_S)
    slot = NewSlot(3, pack_ids([5, 6, 7]), 1, b"", 0.0, -1, 1.0, seed=9)
    results = [runner.launch(plan(0, 1, [slot]))(), runner.launch(plan(1, 1, []))()]
    assert slept == pytest.approx([STEP_S, STEP_S])
    chunk, last = [unpack_ids(result.token_ids)[0] for result in results]
    assert chunk == -1
    assert 0 < last < 1000
    assert [(result.step, result.session) for result in results] == [(0, 7), (1, 7)]


def test_a_plan_without_rows_takes_no_time() -> None:
    runner = PacedRunner(SimulatedSlots(4, 1000), 60.0)
    assert runner.launch(StepPlan(0, 0, b"", b"", [], pack_ids([3])))().token_ids == b""


def test_only_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STEP_MS_VARIABLE, "20")
    real: object = worker_main.start
    monkeypatch.setattr(worker_main, "start", real)
    install("scheduler_proc/1")
    assert worker_main.start is real
    install("worker_proc/1")
    replaced: object = worker_main.start
    assert isinstance(replaced, partial)
    assert (replaced.func, replaced.args) == (start, (STEP_S,))
