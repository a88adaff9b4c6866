"""Some seconds of the soak; an hour of it: python -m tests.faults.soak."""

from pathlib import Path

import pytest

from tests.faults.soak import run

MAX_GROWTH_MB = 40.0  # in so short a time caches still fill


@pytest.mark.alone
def test_under_a_mixed_load_no_request_is_lost_and_nothing_is_left(
    llama_dir: Path, tmp_path: Path
) -> None:
    soak = run(llama_dir, 5.0, tmp_path)
    assert not soak.tally.wrong
    assert soak.tally.outcomes.total() > 100
    # In so short a time memory still grows, and files are the connections that happen to be open.
    passing = ("MB more", "open files more")
    assert not [problem for problem in soak.problems if not problem.endswith(passing)]
    for name, (first, last) in soak.footprints().items():
        assert last.megabytes - first.megabytes < MAX_GROWTH_MB, name
