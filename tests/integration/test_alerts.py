"""promtool accepts the files of deploy/prometheus, and the alerts fire when they say."""

import shutil
import subprocess

import pytest

from tests.server import ROOT

DIRECTORY = ROOT / "deploy" / "prometheus"


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", "alerts.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_files_and_the_alerts_fire_as_expected(arguments: list[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool: install it (Debian: prometheus)")
    done = subprocess.run(
        [promtool, *arguments], cwd=DIRECTORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout
