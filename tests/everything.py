"""QUADRIGA_TEST_EVERYTHING=1 adds cases that differ little from those that always run."""

from typing import Any

import pytest

from tests import EVERYTHING


def more(*values: Any) -> Any:
    """Return a case of a parametrized test that runs only with QUADRIGA_TEST_EVERYTHING=1."""
    reason = "runs with QUADRIGA_TEST_EVERYTHING=1"
    return pytest.param(*values, marks=pytest.mark.skipif(not EVERYTHING, reason=reason))
