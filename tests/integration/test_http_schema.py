"""/openapi.json against what the gateway does: what it allows is served or refused with a reason,
what it does not allow is refused, and every answer is as it says."""

import subprocess
import sys
from pathlib import Path

import pytest


def test_answers_are_as_the_document_says_whatever_is_asked(gateway: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "schemathesis", reason="schemathesis comes with pip install -e '.[clients]'"
    )
    command = [str(Path(sys.executable).with_name("st")), "run", f"{gateway}/openapi.json"]
    # Which values a model's context and vocabulary allow, no schema can say.
    command += ["--exclude-checks", "positive_data_acceptance", "--phases", "fuzzing"]
    command += ["--max-examples", "20", "--seed", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-5000:]
