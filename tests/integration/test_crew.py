"""A crew keeps the processes of one replica on its machine; here the test is its actor."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quadriga import programs
from quadriga.wire.links import NodeLinks, ReservedPort
from quadriga.wire.sockets import bind_frames
from tests.waiting import wait_until

TIMEOUT_S = 90.0


class Actor:
    """A crew and the other end of its control channel."""

    def __init__(self, *flags: str) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(TIMEOUT_S)
        self._lines = self._control.makefile("r")
        command = [*programs.command_of("cluster_proc.crew"), "--replica", "2"]
        command += ["--control-fd", str(theirs.fileno()), "--node-host", "127.0.0.1"]
        command += ["--inner-key-id", "", *flags]  # no keys
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()

    def report(self, kind: str) -> dict[str, Any]:
        """Wait for the next report, which must be of this kind."""
        report: dict[str, Any] = json.loads(self._lines.readline())
        assert report.pop("report") == kind, report
        return report

    def send(self, line: str) -> None:
        self._control.sendall(f"{line}\n".encode())

    def close(self) -> None:
        self._lines.close()
        self._control.close()

    def processes(self) -> dict[str, psutil.Process]:
        """Return its processes by module."""
        children = psutil.Process(self.process.pid).children()
        return {child.cmdline()[2]: child for child in children}


@pytest.fixture
def delivery() -> Iterator[str]:
    port = ReservedPort("127.0.0.1")
    links = NodeLinks(delivery=port.address)
    results = bind_frames(links.delivery, links.prepare_bind)
    yield port.address
    results.close(linger=0)
    port.close()


def test_it_joins_restarts_what_dies_and_leaves_nothing(llama_dir: Path, delivery: str) -> None:
    flags = ["--cluster", "ray", "--model", str(llama_dir), "--dtype", "float32"]
    flags += ["--worker-threads", "1", "--max-total-tokens", "1024"]
    actor = Actor("--delivery-address", delivery, *flags)
    try:
        joined = actor.report("joined")
        assert joined["address"].startswith("tcp://127.0.0.1:")
        assert joined["info"]["dtype"] == "float32"
        processes = actor.processes()
        assert processes.keys() == {"worker_proc", "scheduler_proc", "detok_proc"}
        processes["detok_proc"].send_signal(signal.SIGKILL)
        assert actor.report("died")["process"] == "detok_proc/2"
        assert actor.report("restarted") == {"process": "detok_proc/2"}
        actor.send("reload")
        assert actor.report("died")["process"] == "worker_proc/2"
        assert actor.report("restarted") == {"process": "worker_proc/2"}
        pids = [actor.process.pid, *(child.pid for child in actor.processes().values())]
        line = processes["scheduler_proc"].cmdline()
        run_dir = Path(line[line.index("--run-dir") + 1]).parent
        assert run_dir.exists()
        os.kill(actor.process.pid, signal.SIGKILL)
        actor.process.wait()
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids[1:]), 10)
        assert not run_dir.exists()
    finally:
        actor.close()
        actor.process.kill()
        actor.process.wait()


def test_a_model_that_is_not_on_its_machine_is_a_loss_with_the_reason(delivery: str) -> None:
    actor = Actor("--delivery-address", delivery, "--cluster", "ray", "--model", "/no/such/model")
    try:
        assert "/no/such/model" in actor.report("lost")["reason"]
        assert actor.process.wait(TIMEOUT_S) != 0
    finally:
        actor.close()
        actor.process.kill()
        actor.process.wait()
