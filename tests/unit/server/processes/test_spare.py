"""A spare worker waits, becomes the process of a command line, and is no loss when it has died."""

import socket
import sys
from collections.abc import Iterator

import psutil
import pytest

from quadriga.server.processes import spare
from quadriga.server.processes.spare import DELAY_S, SpareWorker, SpareWorkers

WAITS = """
import os, sys
from quadriga.server.processes.spare import receive_command
command = receive_command(int(sys.argv[1]))
control = int(command[command.index("--control-fd") + 1])
os.write(control, " ".join(command[1:-1]).encode())
os.read(control, 1)
"""
COMMAND = [sys.executable, "-c", WAITS]
LONG = "x" * 200_000  # more than one message of a socket


@pytest.fixture
def control() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    with ours, theirs:
        yield ours, theirs


def test_a_spare_worker_gets_its_command_line_and_its_control_channel(
    control: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = control
    waiting = SpareWorker(COMMAND)
    process = waiting.take(["python", "worker_proc", "--of-model", "chat"], theirs)
    assert process is not None
    assert ours.recv(1000) == b"worker_proc --of-model chat --control-fd"
    if sys.platform == "linux":
        words = psutil.Process(process.pid).cmdline()
        assert words[:5] == ["python", "worker_proc", "--of-model", "chat", "--control-fd"]
        assert not " ".join(words[6:]).strip(), "nothing of the old command line is left"
    ours.send(b"!")
    assert process.wait(30) == 0


def test_a_command_line_may_be_longer_than_the_room_for_it(
    control: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = control
    process = SpareWorker(COMMAND).take(["python", LONG], theirs)
    assert process is not None
    received = b""
    while len(received) < len(LONG):
        received += ours.recv(1 << 20)
    assert received.startswith(LONG.encode())
    ours.send(b"!")
    assert process.wait(30) == 0


def test_a_spare_worker_ends_with_the_launcher() -> None:
    waiting = SpareWorker(COMMAND)
    waiting._socket.close()
    assert waiting._process.wait(30) == 0


def test_a_spare_worker_that_has_died_is_not_taken(
    control: tuple[socket.socket, socket.socket],
) -> None:
    waiting = SpareWorker([sys.executable, "-c", ""])
    waiting._process.wait(30)
    assert waiting.take(["python"], control[1]) is None


def test_one_is_kept_and_started_some_time_after_the_last_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fake:
        num_started = num_ended = 0

        def __init__(self, _command: list[str]) -> None:
            Fake.num_started += 1

        def close(self) -> None:
            Fake.num_ended += 1

    monkeypatch.setattr(spare, "SpareWorker", Fake)
    now = 0.0
    spares = SpareWorkers([], lambda: now)
    spares.keep(is_quiet=True)
    assert spares.seconds_to_next() == DELAY_S
    spares.keep(is_quiet=False)
    assert spares.seconds_to_next() is None, "a model is loaded"
    spares.keep(is_quiet=True)
    now += DELAY_S
    spares.keep(is_quiet=True)
    assert Fake.num_started == 1 and spares.seconds_to_next() is None
    assert spares.take() is not None and spares.take() is None
    spares.keep(is_quiet=True)
    now += DELAY_S
    spares.keep(is_quiet=True)
    spares.close()
    assert (Fake.num_started, Fake.num_ended) == (2, 1)
