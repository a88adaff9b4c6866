"""Start a real server for a test, and check that it leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.errors import QuadrigaError
from quadriga.server.processes.process_name import ProcessName
from tests.waiting import wait_until as wait_until

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0


@dataclass
class Server:
    """A running launcher.

    Attributes:
        run_dir: Directory of its sockets.
        pids: Pids of its processes by name, at the start.
    """

    process: "subprocess.Popen[bytes]"
    endpoint: str
    log: Path
    run_dir: Path
    pids: dict[str, int]

    def pid_of(self, name: str) -> int:
        """Return the current pid of a process, which may have been restarted, or 0.

        That of a replica or model among several is called as in the log: scheduler_proc/1@chat.
        """
        program, number, model = ProcessName.parse(name)
        replica = "" if number is None else str(number)
        wanted = [program, *(["--replica", replica] if replica else [])]
        wanted += ["--of-model", model] if model else []
        for child in psutil.Process(self.process.pid).children():
            try:
                line = child.cmdline()
                is_it = all(word in line for word in wanted)
                if replica and is_it:
                    is_it = line[line.index("--replica") + 1] == replica
                if is_it and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
            except psutil.NoSuchProcess:
                continue
        return 0

    def leftovers(self) -> list[str]:
        """Return processes and files of this server that still exist."""
        alive = [f"{name} {pid}" for name, pid in self.pids.items() if is_alive(pid)]
        return alive + ([str(self.run_dir)] if self.run_dir.exists() else [])

    def wait_for_nothing_left(self, seconds: float = 5.0) -> None:
        """Fail unless every process and file is gone within `seconds`."""
        wait_until(lambda: not self.leftovers(), seconds, lambda: f"left: {self.leftovers()}")


def is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def launch(
    endpoint: str,
    *flags: str,
    log: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a launcher, without HTTP unless the flags have --port.

    Args:
        endpoint: Its public socket.
        flags: Further flags.
        log: File of its output; None: a pipe.
        environment: Variables in addition to those of this process.
    """
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
    """Start a server and wait until it answers; stop it and check that nothing is left."""
    endpoint = endpoint or f"tcp://127.0.0.1:{free_port()}"
    process = launch(endpoint, *flags, log=log, environment=environment)
    try:
        server = _running(process, endpoint, log)
        yield server
        stop(process)
        server.wait_for_nothing_left()
    finally:
        kill_tree(process)


def wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait for the launcher's line that the server is ready."""

    def is_ready() -> bool:
        assert process.poll() is None, f"the server did not start:\n{log.read_text()}"
        return "quadriga ready" in log.read_text()

    wait_until(is_ready, START_TIMEOUT_S, log.read_text)


def _running(process: "subprocess.Popen[bytes]", endpoint: str, log: Path) -> Server:
    wait_until_ready(process, log)
    with Client(endpoint) as client:
        # The scheduler may not have received the worker's message yet.
        wait_until(lambda: client.info()["ready"], START_TIMEOUT_S, log.read_text)
        pids = client.info()["pids"]
    for child in psutil.Process(process.pid).children():
        if child.pid not in pids.values():
            pids["http_proc"] = child.pid
    arguments = psutil.Process(pids["tokenizer_proc"]).cmdline()
    run_dir = Path(arguments[arguments.index("--server-dir") + 1])
    return Server(process, endpoint, log, run_dir, pids)


def cut_the_power(server: Server) -> None:
    """Kill every process and remove the run directory; only the journal's directory is left."""
    for pid in (server.process.pid, *server.pids.values()):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    shutil.rmtree(server.run_dir, ignore_errors=True)


def stop(process: "subprocess.Popen[bytes]") -> int:
    """Send SIGTERM, and return the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    return process.wait(STOP_TIMEOUT_S)


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill the launcher and its processes that a failed test left running."""
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


def settle(endpoint: str, seconds: float = 20.0) -> dict[str, Any]:
    """Wait until no request runs or waits and no page is held, and return the info."""
    info: dict[str, Any] = {}

    def idle() -> bool:
        nonlocal info
        try:
            with Client(endpoint) as client:
                info = client.info()
        except QuadrigaError:
            return False
        is_empty = info["running"] == info["waiting"] == info["pages_held"] == 0
        return bool(info["ready"] and is_empty)

    wait_until(idle, seconds, lambda: f"info: {info}")
    return info


def run_launcher(*flags: str, endpoint: str = "") -> tuple[int, str]:
    """Return exit code and output of a launcher that ends by itself."""
    process = launch(endpoint or f"tcp://127.0.0.1:{free_port()}", *flags)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output.decode()
