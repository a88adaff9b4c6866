"""Results of steps that are launched ahead are sent in order, while the next ones are launched."""

import threading

import pytest

from quadriga.wire.worker import ResultMessage, StepResult
from worker_proc.result_sender import AsyncResultSender, Wait

SECONDS = 10.0


def fail(error: BaseException) -> None:
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


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_an_error_in_a_step_is_reported(kind: type[BaseException]) -> None:
    errors: list[BaseException] = []

    def broken() -> StepResult:
        raise kind("the GPU is gone")

    results = AsyncResultSender(lambda result: pytest.fail(str(result)), errors.append)
    results.send(broken)
    results.close()
    assert [str(error) for error in errors] == ["the GPU is gone"]
