"""The size of a prefill step, out of what steps take."""

from collections.abc import Iterator

from worker_proc.startup.prefill_tuning import (
    CANDIDATE_SIZES,
    MAX_TUNING_S,
    smallest_good_size,
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


def chosen(*seconds: float) -> int:
    """Where the sizes take so long."""
    times: Iterator[tuple[int, float]] = zip(CANDIDATE_SIZES, seconds, strict=True)
    return smallest_good_size(list(CANDIDATE_SIZES), dict(times).__getitem__)
