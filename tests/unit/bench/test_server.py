"""A server that the bench starts is gone when the bench is."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.client import server as bench_server
from bench.client.server import OwnServer
from quadriga.errors import ServerFailed, ServerUnreachable
from quadriga.server.config.server_config import ServerConfig
from tests.server import is_alive
from tests.waiting import wait_until

TIMEOUT_S = 10.0

POLITE = """
import signal, sys
def leave(number, frame):
    print("bye", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGINT, leave)
print("up", *sys.argv[1:], flush=True)
signal.pause()
"""
STUBBORN = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("up", child.pid, flush=True)
signal.pause()
"""
BROKEN = "print('first'); print('the model is missing'); raise SystemExit(3)"


def own_server(tmp_path: Path, program: str, **flags: Any) -> tuple[OwnServer, Path]:
    launcher, log = tmp_path / "launcher.py", tmp_path / "server.log"
    launcher.write_text(program)
    return OwnServer(ServerConfig().replace(**flags), log, launcher), log


def is_up(log: Path) -> Callable[[], bool]:
    return lambda: log.exists() and "up" in (text := log.read_text()) and text.endswith("\n")


def test_a_server_gets_the_flags_and_is_stopped_by_sigint_first(tmp_path: Path) -> None:
    server, log = own_server(tmp_path, POLITE, max_batch_size=3)
    with server:
        wait_until(is_up(log), TIMEOUT_S)
    assert f"--endpoint {server.endpoint} --max-batch-size 3" in log.read_text()
    assert f"bye {signal.SIGINT.value}" in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_that_does_not_stop_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_server, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(bench_server, "CHILDREN_TIMEOUT_S", 0.1)
    server, log = own_server(tmp_path, STUBBORN)
    with server:
        wait_until(is_up(log), TIMEOUT_S)
        child = int(log.read_text().split()[1])
        assert is_alive(child)
    wait_until(lambda: not is_alive(child), TIMEOUT_S)


def test_a_server_that_exits_at_the_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    async def no_answer() -> dict[str, Any]:
        raise ServerUnreachable("no answer")

    server, _ = own_server(tmp_path, BROKEN)
    with server, pytest.raises(ServerFailed, match=r"exit code 3(.|\n)*the model is missing"):
        asyncio.run(server.wait_ready(no_answer))


def test_waiting_has_an_end(tmp_path: Path) -> None:
    async def starting() -> dict[str, Any]:
        return {"ready": False}

    server, _ = own_server(tmp_path, POLITE, start_timeout=0.2)
    with server, pytest.raises(ServerFailed, match=r"not ready after 0\.2 s"):
        asyncio.run(server.wait_ready(starting))


def test_a_server_is_ready_when_its_info_says_ready(tmp_path: Path) -> None:
    answers: list[dict[str, Any]] = [{"ready": False}, {"ready": True, "model": "m"}]

    async def attempt() -> dict[str, Any]:
        return answers.pop(0)

    server, _ = own_server(tmp_path, POLITE)
    with server:
        assert asyncio.run(server.wait_ready(attempt))["model"] == "m"


@pytest.mark.skipif(sys.platform != "linux", reason="uses the parent death signal")
def test_a_server_dies_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    launcher, log = tmp_path / "launcher.py", tmp_path / "server.log"
    launcher.write_text(f"import os; print('pid', os.getpid(), flush=True)\n{POLITE}")
    program = (
        "import time; from pathlib import Path; from bench.client.server import OwnServer;"
        "from quadriga.server.config.server_config import ServerConfig;"
        f"OwnServer(ServerConfig(), Path({str(log)!r}), Path({str(launcher)!r})).__enter__();"
        "time.sleep(60)"
    )
    bench = subprocess.Popen(
        [sys.executable, "-c", program], cwd=Path(__file__).resolve().parents[3]
    )
    wait_until(is_up(log), TIMEOUT_S)
    pid = int(log.read_text().split()[1])
    os.kill(bench.pid, signal.SIGKILL)
    bench.wait()
    wait_until(lambda: not is_alive(pid), TIMEOUT_S)
