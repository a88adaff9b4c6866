"""The time of a step on a GPU, with a stand-in for CUDA's events."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import DECODE, StepPlan
from tests.tiny_models import tiny_gpt2
from tests.unit.worker_driver import Driver, runner_of
from worker_proc.step import engine
from worker_proc.step.clock import step_clock
from worker_proc.step.inputs import StepInputs, make_inputs


class RecordedEvent:
    """An event that notes when it is recorded."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def record(self, stream: object) -> None:
        self._log.append("event")

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, ended: object) -> float:
        return 250.0


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **kinds: RecordedEvent(log))
    return log


def test_a_step_begins_with_its_kernels_and_not_while_the_host_prepares_it(
    log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_gpt2(tmp_path), attention_backend="torch")
    runner._start_clock = step_clock(torch.device("cuda"))
    forward = runner.engine.forward

    def logged_forward(inputs: StepInputs) -> Tensor:
        log.append("forward")
        return forward(inputs)

    def logged_prepare(*arguments: object) -> StepInputs:
        log.append("prepare")
        return make_inputs(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.engine, "forward", logged_forward)
    monkeypatch.setattr(engine, "make_inputs", logged_prepare)
    driver = Driver(runner)
    driver.generate([driver.add([1, 2, 3])], 1)
    assert log == ["prepare", "event", "forward", "event"]


def test_a_plan_without_rows_has_times(log: list[str], tmp_path: Path) -> None:
    runner = runner_of(tiny_gpt2(tmp_path), attention_backend="torch")
    runner._start_clock = step_clock(torch.device("cuda"))
    result = runner.run(StepPlan(0, DECODE, pack_ids([]), pack_ids([]), [], b""))
    assert result.ended - result.began == pytest.approx(0.25)
