"""The size of a prefill step, out of what steps take."""

from collections.abc import Iterator
from pathlib import Path

from tests.tiny_encoders import CONTEXT_LENGTH, tiny_bert
from tests.unit.worker_driver import runner_of
from worker_proc.startup.prefill_tuning import (
    CANDIDATE_SIZES,
    MAX_TUNING_S,
    MAX_VECTOR_STEP_S,
    VECTOR_SIZES,
    largest_quick_size,
    smallest_good_size,
    tune_prefill_size,
)


def test_the_smallest_size_whose_rate_is_good_is_taken() -> None:
    assert chosen(0.0078, 0.0155, 0.0310, 0.0620) == 128
    assert chosen(0.0060, 0.0070, 0.0139, 0.0277) == 256
    assert chosen(0.0040, 0.0050, 0.0080, 0.0130) == 1024


def test_one_slow_moment_does_not_count() -> None:
    seconds = iter([0.050, 0.0078, 0.0155, 0.090, 0.0310, 0.0310, 0.0620, 0.0620])
    assert smallest_good_size(list(CANDIDATE_SIZES), lambda _: next(seconds)) == 128


def test_a_slow_machine_tries_few_sizes() -> None:
    asked: list[int] = []

    def seconds_of(size: int) -> float:
        asked.append(size)
        return size / 256 * MAX_TUNING_S

    assert smallest_good_size(list(CANDIDATE_SIZES), seconds_of) == 128
    assert asked == [128]  # a second try would leave no time to compare it with another size


def test_a_step_of_texts_is_as_large_as_a_newcomer_can_wait_for() -> None:
    def size_at(tokens_per_s: float) -> int:
        return largest_quick_size(VECTOR_SIZES, lambda size: size / tokens_per_s)

    assert size_at(512 / MAX_VECTOR_STEP_S) == 512
    assert size_at(1e9) == VECTOR_SIZES[-1]
    assert size_at(1.0) == VECTOR_SIZES[0]


def test_a_step_of_an_encoder_is_larger_than_its_context(tmp_path: Path) -> None:
    runner = runner_of(
        tiny_bert(tmp_path / "model"), attention_backend="native", max_running_requests=64
    )
    assert runner.table.context_length == CONTEXT_LENGTH < 128
    assert tune_prefill_size(runner) > CONTEXT_LENGTH


def chosen(*seconds: float) -> int:
    """Where the sizes take so long."""
    times: Iterator[tuple[int, float]] = zip(CANDIDATE_SIZES, seconds, strict=True)
    return smallest_good_size(list(CANDIDATE_SIZES), dict(times).__getitem__)
