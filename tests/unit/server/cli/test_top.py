"""quadriga top: the picture, its lines, both kinds of servers, and the end on a terminal."""

import argparse
import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quadriga.errors import ConfigError, ServerUnreachable
from quadriga.server.cli import top as command
from quadriga.server.cli.live_picture import Picture, gateway_messages
from quadriga.server.cli.main import main
from quadriga.server.cli.server_api import CallRefused, ServerApi
from quadriga.server.cli.top import ENTER, LEAVE, Style, screen
from quadriga.wire.live import (
    EventKind,
    LiveEvent,
    LiveMessage,
    LiveProcess,
    LiveServer,
    RowKind,
    SkipReason,
)
from tests.unit.live_messages import GAUGES, make_request, make_step
from tests.unit.scripted_ring import ScriptedRing, gateway_before

PLAIN = Style(150, 40, has_color=False)


def picture_of(*messages: LiveMessage) -> Picture:
    picture = Picture()
    for message in messages:
        picture.take(message)
    return picture


def server(at: float, *processes: LiveProcess) -> LiveServer:
    return LiveServer(at, list(processes), 0, 1, 1, 0)


def process(cpu_seconds: float, pid: int = 5) -> LiveProcess:
    return LiveProcess("worker_proc", pid, cpu_seconds, 200 << 20, 1.0)


# --- the picture ----------------------------------------------------------------------------------


def test_a_lane_has_a_cell_for_each_step() -> None:
    one, two = make_request(1), make_request(2)
    picture = picture_of(
        make_step(0, {1: RowKind.CHUNK}, {SkipReason.BUDGET: [2]}, [one, two], is_whole=True),
        make_step(1, {1: RowKind.PREFILL, 2: RowKind.CHUNK}),
        make_step(2, {1: RowKind.DECODE}, {SkipReason.TURN: [2]}),
    )
    assert ["".join(row.lane) for row in picture.rows.values()] == ["pPd", ".p."]
    assert [row.doing for row in picture.rows.values()] == ["decode", "turn"]
    assert picture.rows[1].num_generated == one.num_generated_tokens + 1


def test_requests_that_end_or_that_a_whole_message_does_not_have_leave() -> None:
    requests = [make_request(number) for number in (1, 2, 3)]
    rows = dict.fromkeys((1, 2, 3), RowKind.DECODE)
    picture = picture_of(
        make_step(0, rows, requests=requests, is_whole=True),
        make_step(1, {2: RowKind.DECODE}, events=[LiveEvent(EventKind.FINISHED, 1, "stop")]),
        make_step(2, {2: RowKind.DECODE}, requests=requests[1:2], is_whole=True),
    )
    assert list(picture.rows) == [2]
    assert picture.events[-1][1] == "r1 finished: stop"


def test_lost_messages_are_counted_but_not_those_before_a_restart() -> None:
    picture = picture_of(make_step(0), make_step(1), make_step(5), make_step(0), make_step(1))
    assert picture.num_lost == 3


def test_a_process_that_is_replaced_is_an_event_and_cpu_time_becomes_a_share() -> None:
    picture = picture_of(server(10.0, process(1.0)), server(11.0, process(1.5)))
    assert picture.processes[5].cpu_share == pytest.approx(0.5)
    picture.take(server(12.0, process(0.1, pid=6)))
    assert [text for _, text in picture.events] == [
        "worker_proc was started (pid 6)",
        "worker_proc has ended (pid 5)",
    ]


def test_the_models_of_a_server_with_several_are_loaded_where_a_worker_runs() -> None:
    names = ["scheduler_proc@chat", "worker_proc/1@chat", "scheduler_proc@coder", "http_proc"]
    processes = [LiveProcess(name, pid, 1.0, 1, 1.0) for pid, name in enumerate(names)]
    lines = screen(picture_of(make_step(0), server(1.0, *processes)), "tcp://x", PLAIN)
    assert "models: chat loaded · coder unloaded" in lines
    lines = screen(picture_of(make_step(0), server(1.0, process(1.0))), "tcp://x", PLAIN)
    assert not any("models:" in line for line in lines)


def test_rates_are_those_of_the_last_seconds() -> None:
    picture = Picture()
    for number in range(20):
        picture.take(make_step(number, time=100.0 + number, generation_tokens_total=30 * number))
    assert picture.rate("generation_tokens_total") == pytest.approx(30)
    picture.take(server(130.0))
    assert picture.rate("generation_tokens_total") == 0.0


# --- lines ----------------------------------------------------------------------------------------


def test_the_screen_says_why_a_request_waits() -> None:
    picture = picture_of(
        make_step(0, {1: RowKind.DECODE}, {SkipReason.PAGES: [2]},
                  [make_request(1), make_request(2)], is_whole=True),
        server(10.0, process(1.0)),
    )  # fmt: skip
    lines = "\n".join(screen(picture, "tcp://x", PLAIN))
    assert "waits: pages" in lines
    assert "worker_proc" in lines and "200 MiB" in lines
    assert "\x1b" not in lines


def test_more_requests_than_lines_are_counted() -> None:
    requests = [make_request(number) for number in range(100)]
    rows = {request.seq: RowKind.DECODE for request in requests}
    picture = picture_of(make_step(0, rows, requests=requests, is_whole=True))
    lines = screen(picture, "tcp://x", Style(120, 20, has_color=True))
    assert len(lines) <= 20
    assert any("other requests" in line for line in lines)


@pytest.mark.parametrize("width", [1, 20, 60, 300])
@pytest.mark.parametrize("height", [1, 5, 50])
def test_any_size_of_a_terminal_will_do(width: int, height: int) -> None:
    requests = [make_request(number) for number in range(8)]
    picture = picture_of(
        make_step(0, {1: RowKind.DECODE}, {SkipReason.SLOTS: [2]}, requests, is_whole=True),
        server(10.0, process(1.0)),
    )
    assert len(screen(picture, "tcp://x", Style(width, height, has_color=False))) <= height
    assert screen(Picture(), "tcp://x", Style(width, height, has_color=True))


# --- the gateway ----------------------------------------------------------------------------------


def put_some(ring: ScriptedRing) -> None:
    ring.live.put_nowait(make_step(0, {1: RowKind.DECODE}, {}, [make_request(1)], is_whole=True))
    ring.live.put_nowait(server(10.0, process(1.0)))


async def test_the_messages_of_a_gateway_are_those_of_the_ring() -> None:
    ring = ScriptedRing([])
    async with gateway_before(ring) as (url, _):
        put_some(ring)
        messages = gateway_messages(url, "", 0)
        first, second = await anext(messages), await anext(messages)
        await messages.aclose()
    assert first == make_step(0, {1: RowKind.DECODE}, {}, [make_request(1)], is_whole=True)
    assert second == server(10.0, process(1.0))


async def test_a_missing_key_and_a_missing_server_are_errors_with_the_reason() -> None:
    async with gateway_before(ScriptedRing([]), api_key="secret") as (url, _):
        with pytest.raises(CallRefused, match=r"401 for /v1/live.*: no valid API key"):
            await anext(gateway_messages(url, "wrong", 0))
    with pytest.raises(ServerUnreachable, match="no server answers"):
        await anext(gateway_messages(url, "wrong", 0))


@pytest.mark.parametrize("interval", ["0", "nan", "1000"])
def test_an_interval_out_of_range_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--interval", interval]) == 1
    assert "0.05 to 60 s are allowed" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{}, {"json": True}])
def test_once_prints_a_frame_or_lines_of_json_and_ends(
    flags: dict[str, bool], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def messages(*_: object) -> Any:
        yield make_step(0, {1: RowKind.DECODE}, {}, [make_request(1)], is_whole=True)
        yield server(10.0, process(1.0))
        yield server(11.0, process(1.25))
        raise AssertionError("nothing more is needed")

    monkeypatch.setattr(command, "ring_messages", messages)
    values = {"endpoint": "tcp://x", "curve_dir": None, "api_key": "", "once": True, "json": False}
    command.run(argparse.Namespace(**values | flags, interval=0.25, replica=0))
    printed = capsys.readouterr().out
    if flags:
        assert [json.loads(line)["type"] for line in printed.splitlines()] == ["step", "server"]
    else:
        assert " 25 % 200 MiB" in printed


# --- a terminal -----------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal."""
    outer, inner = pty.openpty()
    yield outer, inner
    for end in (outer, inner):
        os.close(end)


def read_until(outer: int, wanted: bytes) -> bytes:
    read, deadline = b"", time.monotonic() + 30
    while wanted not in read:
        assert time.monotonic() < deadline, read[-500:]
        if select.select([outer], [], [], 1.0)[0]:
            read += os.read(outer, 65536)
    return read


@pytest.mark.parametrize("how", ["q", "SIGTERM", "SIGINT", "SIGHUP"])
async def test_the_terminal_is_given_back_however_it_ends(
    terminal: tuple[int, int], how: str
) -> None:
    outer, inner = terminal
    ring = ScriptedRing([])
    async with gateway_before(ring) as (url, _):
        put_some(ring)
        top = subprocess.Popen(
            [sys.executable, "-m", "quadriga", "top", "--endpoint", url],
            stdin=inner, stdout=inner, stderr=inner, env=os.environ | {"TERM": "xterm"},
        )  # fmt: skip
        try:
            shown = await asyncio.to_thread(read_until, outer, b"1 running")
            assert ENTER.encode() in shown
            if how == "q":
                os.write(outer, b"q")
            else:
                top.send_signal(getattr(signal, how))
            rest = await asyncio.to_thread(read_until, outer, LEAVE.encode())
            await asyncio.to_thread(top.wait, 30)
            assert b"Traceback" not in rest
        finally:
            top.kill()
            await asyncio.to_thread(top.wait, 30)


def test_feeds_name_a_wrong_address() -> None:
    with pytest.raises(ConfigError, match="not the address of a server"):
        ServerApi("http://", "")


def test_gauges_of_the_messages_are_used() -> None:
    assert picture_of(make_step(0)).gauges == GAUGES
