"""Results of steps that are launched ahead are sent in order, while the next ones are launched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.wire.worker import ResultMessage, StepResult
from tests.unit.worker_driver import Driver, runner_of
from worker_proc.result_sender import AsyncResultSender, Wait
from worker_proc.startup.build import mark_steps

SECONDS = 10.0


def fail(error: Exception) -> None:
    raise AssertionError("nothing goes wrong here") from error


def step(number: int, done: threading.Event) -> Wait:
    def finish() -> StepResult:
        assert done.wait(SECONDS)
        return StepResult(number, b"", 0.0, 0.0)

    return finish


def test_the_next_step_is_launched_before_the_last_one_has_ended() -> None:
    sent: list[ResultMessage] = []
    results, done = AsyncResultSender(sent.append, fail), [threading.Event() for _ in range(3)]
    for number, event in enumerate(done):
        results.send(step(number, event))
    assert not sent
    for event in reversed(done):
        event.set()
    results.close()
    assert [result.step for result in sent if isinstance(result, StepResult)] == [0, 1, 2]


def test_the_thread_is_prepared_before_it_waits_for_a_step() -> None:
    called: list[str] = []
    results = AsyncResultSender(
        lambda result: called.append("sent"), fail, lambda: called.append("prepared")
    )
    results.send(lambda: StepResult(0, b"", 0.0, 0.0))
    results.close()
    assert called == ["prepared", "sent"]


def test_an_error_in_a_step_is_reported() -> None:
    errors: list[Exception] = []

    def broken() -> StepResult:
        raise RuntimeError("the GPU is gone")

    results = AsyncResultSender(lambda result: pytest.fail(str(result)), errors.append)
    results.send(broken)
    results.close()
    assert [str(error) for error in errors] == ["the GPU is gone"]


def test_the_parts_of_a_step_are_marked_for_a_profiler(gpt2_dir: Path) -> None:
    marks: list[str] = []

    @contextmanager
    def begin(name: str) -> Iterator[None]:
        marks.append(name)
        yield

    runner = runner_of(gpt2_dir)
    mark_steps(runner, begin)
    driver = Driver(runner)
    driver.generate([driver.add([1, 2, 3])], 1)
    assert marks == ["launch", "execute", "forward_and_sample"]
    with pytest.raises(ConfigError, match="enable_nvtx is for CUDA, the device is cpu"):
        runner_of(gpt2_dir, enable_nvtx=True)
