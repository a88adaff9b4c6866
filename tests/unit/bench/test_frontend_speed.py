"""The worker of bench.frontend_speed, which computes nothing, and the table of its runs."""

import time
from functools import partial

import pytest

from bench.client.resources import BENCH
from bench.frontend_speed import FrontendRun, main, table
from bench.paced_worker import PacedRunner, install, paced_environment, start
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.worker import NewSlot, StepPlan
from simulator.replica import SimulatedSlots
from worker_proc import main as worker_main

STEP_S = 0.02


def plan(step: int, num_tokens: int, new: list[NewSlot]) -> StepPlan:
    return StepPlan(step, 0, pack_ids([3]), pack_ids([num_tokens]), new, b"", session=7)


def test_a_step_takes_its_time_and_samples_where_all_known_tokens_are_computed() -> None:
    runner = PacedRunner(SimulatedSlots(4, 1000), STEP_S)
    slot = NewSlot(3, pack_ids([5, 6, 7]), 1, b"", 0.0, -1, 1.0, seed=9)
    began = time.monotonic()
    results = [runner.launch(plan(0, 1, [slot]))(), runner.launch(plan(1, 1, []))()]
    assert time.monotonic() - began >= 2 * STEP_S
    chunk, last = [unpack_ids(result.token_ids)[0] for result in results]
    assert chunk == -1
    assert 0 < last < 1000
    assert [(result.step, result.session) for result in results] == [(0, 7), (1, 7)]


def test_a_plan_without_rows_takes_no_time() -> None:
    runner = PacedRunner(SimulatedSlots(4, 1000), 60.0)
    assert runner.launch(StepPlan(0, 0, b"", b"", [], pack_ids([3])))().token_ids == b""


def test_only_workers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in paced_environment(20.0).items():
        monkeypatch.setenv(name, value)
    real: object = worker_main.start
    monkeypatch.setattr(worker_main, "start", real)
    install("scheduler_proc/1")
    assert worker_main.start is real
    install("worker_proc/1")
    replaced: object = worker_main.start
    assert isinstance(replaced, partial)
    assert (replaced.func, replaced.args) == (start, (STEP_S,))


def test_the_table_compares_with_the_first_run() -> None:
    cpu_s = {"tokenizer_proc": 0.01, "scheduler_proc": 0.02, "detok_proc": 0.01, BENCH: 0.06}
    runs = [
        FrontendRun(1, 1000, 1.0, {**cpu_s, "worker_proc": 0.0}, 0),
        FrontendRun(4, 3000, 1.0, {**cpu_s, "worker_proc": 0.0}, 0),
    ]
    first, second = [line.split(" | ") for line in table(runs).splitlines()[2:]]
    assert first == [
        "| 1",
        "1000",
        "1.000",
        "10.0",
        "20.0",
        "10.0",
        "0.0",
        "60.0",
        "0.10",
        "100000 |",
    ]
    assert second[:4] == ["| 4", "3000", "0.750", "3.3"]


def test_a_number_that_is_not_positive_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replicas", "2", "0"]) == 2
    assert "--replicas, --streams, --max-new-tokens and --step-ms" in capsys.readouterr().err
