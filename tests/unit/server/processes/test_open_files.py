"""The limit of open files: how far it is raised, and who is warned before it is reached."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from http_proc import server
from quadriga.server.processes import machine
from quadriga.server.processes.machine import WARN_EVERY_S, FileWatch
from quadriga.wire import sockets
from quadriga.wire.async_sockets import ConnectionWatch
from tests.server import ROOT

RAISE = """
import resource, sys
from quadriga.server.processes.machine import allow_open_files
soft, hard, wanted = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(allow_open_files(wanted), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [(64, 256, 128, (128, 128)), (64, 256, 1000, (256, 256)), (200, 256, 128, (200, 200))],
)
def test_the_limit_is_raised_as_far_as_is_wanted_and_allowed(
    soft: int, hard: int, wanted: int, expected: tuple[int, int]
) -> None:
    """In a process of its own, whose limit it is."""
    command = [sys.executable, "-c", RAISE, str(soft), str(hard), str(wanted)]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
    )
    assert found.stdout.split() == [str(expected[0]), str(expected[1]), str(hard)]


def test_near_the_limit_a_warning_comes_once_a_minute_and_then_connections_are_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("resource.getrlimit", lambda _: (1000, 1000))
    caplog.set_level(logging.WARNING)
    ended: list[int] = []
    watch = FileWatch()
    monkeypatch.setattr(machine, "_shut_down", ended.append)
    watch.on_accept(899)
    assert caplog.messages == []
    for descriptor in range(900, 1000):
        watch.on_accept(descriptor)
    assert len(caplog.messages) == 1
    assert "901 of 1000 files are open" in caplog.messages[0]
    assert ended == list(range(936, 1000))
    now += WARN_EVERY_S
    watch.on_accept(950)
    assert len(caplog.messages) == 2


async def test_the_frontend_gets_the_descriptor_of_each_connection(tmp_path: Path) -> None:
    taken: list[int] = []
    public = sockets.bind_public(f"ipc://{tmp_path}/door")
    watch = ConnectionWatch(public, lambda: None, on_accept=taken.append)
    client = sockets.connect_public(f"ipc://{tmp_path}/door", b"c")
    while not taken:
        await asyncio.sleep(0.001)
    watch.close()
    client.close(linger=0)
    public.close(linger=0)
    assert taken[0] > 2


def test_the_web_gateway_takes_no_more_connections_than_files(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(server, "allow_open_files", lambda wanted: min(wanted, 1024))
    assert server._max_connections(500) == 500
    assert caplog.messages == []
    assert server._max_connections(4096) == 1024 - server.NUM_RESERVED_FILES
    assert "only 960 HTTP connections" in caplog.messages[0]


def test_a_connection_over_the_bound_is_ended_by_libzmq_itself(tmp_path: Path) -> None:
    """A raw connection, which libzmq would wait for ten seconds."""

    async def run() -> bytes:
        public = sockets.bind_public(f"ipc://{tmp_path}/door")
        watch = ConnectionWatch(public, lambda: None, on_accept=machine._shut_down)
        reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/door")
        found = await reader.read()
        writer.close()
        watch.close()
        public.close(linger=0)
        return found

    assert len(asyncio.run(asyncio.wait_for(run(), 5))) <= 64, "at most a greeting"


def test_descriptors_of_files_are_not_shut_down(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        machine._shut_down(file.fileno())
        machine._shut_down(10**6)
        assert file.write("x") == 1
