"""The channel of a launcher to the program that started it."""

import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from quadriga.server.processes.control_channel import OwnerChannel
from tests.waiting import wait_until


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that were sent, instead of sending them."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number)))
    return sent


@pytest.fixture
def owner(signals: list[tuple[int, int]]) -> Iterator[tuple[OwnerChannel, socket.socket]]:
    theirs, ours = socket.socketpair()
    with theirs:
        yield OwnerChannel(ours.detach()), theirs
    wait_until(lambda: signals, 5)


def test_reports_are_lines_of_json(owner: tuple[OwnerChannel, socket.socket]) -> None:
    channel, theirs = owner
    channel.report_ready("ipc:///run/public")
    channel.report_failure("model", "there is no\nmodel")
    lines = theirs.recv(4096).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"report": "ready", "endpoint": "ipc:///run/public"},
        {"report": "failed", "code": "model", "message": "there is no\nmodel"},
    ]


def test_the_end_of_the_channel_stops_the_launcher(
    owner: tuple[OwnerChannel, socket.socket], signals: list[tuple[int, int]]
) -> None:
    channel, theirs = owner
    assert channel and not channel.is_gone
    theirs.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: signals, 5)
    assert channel.is_gone
    assert signals == [(os.getpid(), signal.SIGTERM)]
    channel.report_ready("to no one")


def test_a_server_that_was_started_by_hand_has_no_owner() -> None:
    channel = OwnerChannel(None)
    assert not channel
    channel.report_ready("tcp://127.0.0.1:5555")
    assert not channel.is_gone
