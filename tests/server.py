"""A real server for a test: started, awaited, and checked to leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.errors import QuadrigaError

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 90.0
STOP_SECONDS = 20.0


@dataclass
class Server:
    """A running launcher. run_dir: where its sockets are; pids: by process name."""

    process: "subprocess.Popen[bytes]"
    endpoint: str
    log: Path
    run_dir: Path
    pids: dict[str, int]

    def pid_of(self, name: str) -> int:
        """The process of this name as it is now, which may be another one than at the start; 0
        where there is none at this moment."""
        for child in psutil.Process(self.process.pid).children():
            try:
                if name in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
            except psutil.NoSuchProcess:
                continue
        return 0

    def leftovers(self) -> list[str]:
        """Processes and files of this server that are still there."""
        alive = [f"{name} {pid}" for name, pid in self.pids.items() if is_alive(pid)]
        return alive + ([str(self.run_dir)] if self.run_dir.exists() else [])

    def wait_for_nothing_left(self, seconds: float = 5.0) -> None:
        """Fail unless every process and file is gone within so many seconds."""
        wait_until(lambda: not self.leftovers(), seconds, lambda: f"left: {self.leftovers()}")


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float, complaint=lambda: "") -> None:  # type: ignore[no-untyped-def]
    """Poll a condition that other processes bring about; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s. {complaint()}"
        time.sleep(0.01)


def launch(
    endpoint: str,
    *flags: str,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a launcher; its log goes to a file or a pipe. Without a --port it serves no HTTP.
    environment: variables beside ours."""
    flags = flags if "--port" in flags else (*flags, "--no-http")
    output = log.open("wb") if log else subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, str(ROOT / "launcher.py"), "--endpoint", endpoint, *flags],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )


@contextmanager
def running_server(
    log: Path, *flags: str, endpoint: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server that answers. On leaving it is stopped, and everything of it must be gone."""
    endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
    process = launch(endpoint, *flags, log=log, environment=environment)
    try:
        server = _wait_until_ready(process, endpoint, log)
        yield server
        stop(process)
        server.wait_for_nothing_left()
    finally:
        kill_tree(process)


def _wait_until_ready(process: "subprocess.Popen[bytes]", endpoint: str, log: Path) -> Server:
    deadline = time.monotonic() + START_SECONDS
    while "quadriga ready" not in log.read_text():
        assert process.poll() is None, f"the server did not start:\n{log.read_text()}"
        assert time.monotonic() < deadline, f"not ready in time:\n{log.read_text()}"
        time.sleep(0.05)
    with Client(endpoint) as client:
        while not (info := client.info())["ready"]:  # the scheduler has not yet heard of the worker
            assert time.monotonic() < deadline, f"not ready in time:\n{log.read_text()}"
            time.sleep(0.01)
        pids = info["pids"]
    for child in psutil.Process(process.pid).children():
        if child.pid not in pids.values():
            pids["http_proc"] = child.pid
    arguments = psutil.Process(pids["worker_proc"]).cmdline()
    run_dir = Path(arguments[arguments.index("--run-dir") + 1])
    return Server(process, endpoint, log, run_dir, pids)


def stop(process: "subprocess.Popen[bytes]") -> int:
    """SIGTERM, and the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    return process.wait(STOP_SECONDS)


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Whatever a failed test left running."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    for child in children:
        try:
            os.kill(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if process.poll() is None:
        process.kill()
    process.wait(5)
    if process.stdout is not None:
        process.stdout.close()


def settle(endpoint: str, seconds: float = 20.0) -> dict:  # type: ignore[type-arg]
    """Wait until nothing runs and nobody holds a page; the info then."""
    info: dict = {}  # type: ignore[type-arg]

    def idle() -> bool:
        nonlocal info
        try:
            with Client(endpoint) as client:
                info = client.info()
        except QuadrigaError:
            return False
        return info["ready"] and info["running"] == info["waiting"] == info["pages_held"] == 0

    wait_until(idle, seconds, lambda: f"info: {info}")
    return info
