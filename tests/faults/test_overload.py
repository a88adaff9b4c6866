"""Ten times the capacity of a server, for a second: see overload.py for the times."""

from pathlib import Path

from tests.faults.overload import run

MAX_LATER = 100
"""A refusal comes before any request is served that was sent so many requests later."""


def test_at_ten_times_the_capacity_refusals_are_immediate_and_accepted_requests_are_served(
    llama_dir: Path, tmp_path: Path
) -> None:
    _, outcome = run(10, 1.0, llama_dir, tmp_path / "log")
    assert len(outcome.refused) > len(outcome.served) > 0
    assert outcome.hints and None not in outcome.hints, "a refusal has retry_after"
    last_served, late = 0, []
    for number, was_served in outcome.ends:
        if was_served:
            last_served = max(last_served, number)
        elif last_served >= number + MAX_LATER:
            late.append(number)
    assert not late
