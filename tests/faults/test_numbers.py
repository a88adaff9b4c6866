"""A part of the kill matrix with answers that are numbers.

The whole is python -m tests.faults.kill_matrix --requests decoder encoder ranker classifier.
"""

import pytest

from tests.everything import more
from tests.faults.kill_matrix import main


@pytest.mark.parametrize("kind", ["decoder", more("encoder"), more("ranker"), more("classifier")])
def test_vectors_scores_and_decisions_are_the_same_after_the_death_of_a_process(kind: str) -> None:
    flags = ["--rounds", "1", "--signals", "SIGKILL", "--moments", "streams"]
    assert main([*flags, "--processes", "worker_proc", "http_proc", "--requests", kind]) == 0
