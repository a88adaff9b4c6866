"""What every crew does: keeps its processes, and leaves none behind at its end."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster.small_crew import RIGHT_KEYS

TIMEOUT_S = 60.0


class StartedCrew:
    """A small crew in a process of its own, and the actor's end of its control channel."""

    def __init__(self, keys: Path) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.cluster.small_crew", str(theirs.fileno()), keys],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._connection, self._lines = ours, ours.makefile()

    def next_report(self) -> dict[str, Any]:
        """Return the next report, or {} after the last one."""
        return dict(json.loads(self._lines.readline() or "{}"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._lines.close()
        self._connection.close()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(RIGHT_KEYS)
    return path


@pytest.fixture
def crew(keys: Path) -> Iterator[StartedCrew]:
    crew = StartedCrew(keys)
    yield crew
    crew.close()


def assert_nothing_is_left(report: dict[str, Any]) -> None:
    """Assert that the processes of a report are gone, and their run directory with them."""
    for pid in report["pids"]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not Path(report["run_dir"]).exists()


def test_a_process_that_died_is_started_again_until_the_crew_does_not_survive_it(
    crew: StartedCrew,
) -> None:
    started = crew.next_report()
    first, second = started["pids"]
    os.kill(first, signal.SIGKILL)
    restarted = crew.next_report()
    assert restarted["report"] == "restarted"
    assert first not in restarted["pids"] and second in restarted["pids"]
    os.kill(restarted["pids"][0], signal.SIGKILL)
    assert crew.next_report()["report"] == "lost"
    assert crew.process.wait(TIMEOUT_S) == 0
    assert_nothing_is_left(restarted)


def test_a_signal_ends_the_crew_and_its_processes(crew: StartedCrew) -> None:
    started = crew.next_report()
    crew.process.terminate()
    assert crew.process.wait(TIMEOUT_S) == 0
    assert_nothing_is_left(started)


def test_other_keys_at_a_restart_end_the_crew_and_its_processes(
    crew: StartedCrew, keys: Path
) -> None:
    started = crew.next_report()
    keys.write_text("another server's")
    os.kill(started["pids"][0], signal.SIGKILL)
    assert crew.process.wait(TIMEOUT_S) == 3
    assert crew.next_report() == {}
    assert_nothing_is_left(started)


def test_with_other_keys_no_process_is_started(keys: Path) -> None:
    keys.write_text("another server's")
    crew = StartedCrew(keys)
    try:
        assert crew.process.wait(TIMEOUT_S) == 3
        assert crew.next_report()["pids"] == []
    finally:
        crew.close()
