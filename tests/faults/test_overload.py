"""Ten times the capacity of a server, for two seconds: see overload.py."""

from pathlib import Path

import pytest

from tests.faults.overload import percentile, run


@pytest.mark.alone
def test_at_ten_times_the_capacity_refusals_are_immediate_and_accepted_requests_are_served(
    llama_dir: Path, tmp_path: Path
) -> None:
    normal, outcome = run(10, 2.0, llama_dir, tmp_path / "log")
    assert len(outcome.refused) > len(outcome.served) > 0
    assert outcome.hints and None not in outcome.hints, "a refusal has retry_after"
    assert percentile(outcome.refused, 0.5) < 50
    assert percentile(outcome.served, 0.5) < 3 * percentile(normal.served, 0.5)
