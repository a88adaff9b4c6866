"""The number of replicas follows the load, and not each of its waves."""

import pytest

from cluster_proc.scaling import Scaling, ScalingLimits

LIMITS = ScalingLimits(min_replicas=1, max_replicas=4, target=10, up_after_s=5, down_after_s=300)


def decisions(scaling: Scaling, loads: list[tuple[float, int]]) -> list[int]:
    numbers = []
    for now, num_open in loads:
        scaling.on_load(num_open, now)
        numbers.append(scaling.decide(now))
    return numbers


def test_replicas_are_added_once_the_load_has_lasted() -> None:
    scaling = Scaling(LIMITS, 1)
    assert decisions(scaling, [(0, 25), (4.9, 25), (5, 25), (6, 25)]) == [1, 1, 3, 3]


def test_a_short_wave_changes_nothing() -> None:
    scaling = Scaling(LIMITS, 1)
    assert decisions(scaling, [(0, 25), (4, 10), (5, 25), (9, 25), (9.5, 0), (20, 25)]) == [1] * 6


@pytest.mark.parametrize("num_open", [11, 200, 10**9])
def test_there_are_never_more_or_less_than_the_limits(num_open: int) -> None:
    scaling = Scaling(LIMITS, 1)
    up = decisions(scaling, [(t, num_open) for t in range(0, 100, 5)])
    assert max(up) == min(4, -(-num_open // 10))
    assert decisions(scaling, [(100.0 + 300 * n, 0) for n in range(9)])[-1] == 1


def test_one_replica_leaves_at_a_time() -> None:
    scaling = Scaling(LIMITS, 4)
    numbers = decisions(scaling, [(0, 0), (299, 0), (300, 0), (301, 0), (600, 0), (900, 0)])
    assert numbers == [4, 4, 3, 3, 2, 1]


def test_a_steady_load_between_the_bounds_makes_no_replica_come_or_go() -> None:
    scaling = Scaling(LIMITS, 2)
    assert decisions(scaling, [(t, 9 if t % 2 else 20) for t in range(2000)]) == [2] * 2000


def test_a_decision_needs_no_further_report_of_the_load() -> None:
    scaling = Scaling(LIMITS, 2)
    assert scaling.wake_at is None
    scaling.on_load(0, 7.0)
    assert scaling.wake_at == 307.0
    assert scaling.decide(307.0) == 1
    assert scaling.wake_at is None
    scaling.on_load(99, 400.0)
    assert scaling.wake_at == 405.0
