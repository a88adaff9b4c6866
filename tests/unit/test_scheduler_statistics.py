"""What the scheduler counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.messages.worker import StepResult
from scheduler_proc.batch import ScheduleBatch
from scheduler_proc.statistics import RECENT_STEPS, Recent, Statistics


@given(st.lists(st.floats(-1, 1), max_size=40), st.integers(1, 9), st.floats(0, 1))
def test_a_percentile_is_that_of_the_last_values(
    values: list[float], size: int, share: float
) -> None:
    recent = Recent(size)
    for value in values:
        recent.add(value)
    last = sorted(values[-size:])
    expected = last[min(len(last) - 1, int(share * len(last)))] if last else 0.0
    assert recent.percentile(share) == expected


def test_the_gap_before_a_step_counts_where_its_plan_was_there() -> None:
    statistics = Statistics()
    for step, (planned_before, gap) in enumerate([(0.5, 0.001), (0.5, 0.001), (-0.5, 0.5)], 1000):
        batch = ScheduleBatch(planned_at=step - planned_before, num_decodes=1)
        statistics.count_step(batch, StepResult(step, b"", step + gap, step + 1.0))
    info = statistics.info()
    assert info["step_gap_ms_p50"] == info["step_gap_ms_p99"] == pytest.approx(1)
    assert info["late_plans"] == 2  # the first step, for which nobody could plan, and the last


def test_gaps_of_long_ago_are_forgotten() -> None:
    statistics = Statistics()
    for step in range(2 * RECENT_STEPS):
        gap = 0.003 if step < RECENT_STEPS else 0.001
        result = StepResult(step, b"", step + gap, step + 1.0)
        statistics.count_step(ScheduleBatch(planned_at=step - 0.5), result)
    assert statistics.info()["step_gap_ms_p99"] == pytest.approx(1)
