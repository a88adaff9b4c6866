"""Lines of a scheduler: the live one of a terminal, which never blocks it, and those of the log."""

import logging
import os
import pty
from collections.abc import Iterator
from typing import Any

import pytest

from quadriga.server.processes.logs import TransientLine
from scheduler_proc.observe.logs import NoStatusLine, StatsLog, TerminalStatusLine, status_line

IDLE = {
    "running": 0,
    "waiting": 0,
    "pages_held": 0,
    "pages_total": 200,
    "generation_tokens_total": 0,
    "prompt_tokens_total": 0,
    "cached_tokens_total": 0,
}


class Shown:
    """A line, its info, and what it showed."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.info: dict[str, Any] = dict(IDLE)
        self.line = TerminalStatusLine(self.texts.append, self.texts.clear, lambda: self.info)

    def at(self, now: float, **changes: Any) -> float | None:
        """Update the line as a scheduler step does. Return when it wants the next update."""
        self.info |= changes
        self.line.update(now)
        return self.line.wake_at


def test_the_status_line_shows_requests_throughput_and_cache() -> None:
    shown = Shown()
    shown.at(100.0, running=1)
    shown.at(102.0, running=3, waiting=12, pages_held=74, generation_tokens_total=824,
             prompt_tokens_total=100, cached_tokens_total=43)  # fmt: skip
    assert shown.texts[-1] == "3 running · 12 waiting · 412 tok/s · KV 37 % · hits 43 %"


def test_many_rounds_a_second_are_one_line_and_what_came_too_soon_is_shown_later() -> None:
    shown = Shown()
    shown.at(100.0, running=1)
    wanted = [shown.at(100.0 + n / 1000, generation_tokens_total=n) for n in range(1, 999)]
    assert len(shown.texts) == 1 and set(wanted) == {101.0}
    shown.at(101.0)
    assert len(shown.texts) == 2


def test_a_server_at_rest_is_shown_so_once_and_then_left_alone() -> None:
    shown = Shown()
    shown.at(100.0, running=1)
    shown.at(100.4, running=0, generation_tokens_total=50)
    wake, rounds = shown.line.wake_at, 0
    while wake is not None:
        wake, rounds = shown.at(wake), rounds + 1
    assert rounds <= 3
    assert shown.texts[-1].startswith("0 running · 0 waiting · 0 tok/s")
    count = len(shown.texts)
    assert shown.at(500.0) is None, "a question that changes nothing"
    assert len(shown.texts) == count
    shown.at(501.0, running=1)
    assert len(shown.texts) == count + 1


def test_a_server_that_never_did_anything_shows_nothing() -> None:
    shown = Shown()
    assert shown.at(100.0) is None and shown.texts == []


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """Our end of a terminal, and its name."""
    ours, theirs = pty.openpty()
    yield ours, os.ttyname(theirs)
    os.close(ours)
    os.close(theirs)


def test_the_cursor_stays_at_the_lines_beginning_and_nothing_is_left_in_the_end(
    terminal: tuple[int, str],
) -> None:
    line = TransientLine(terminal[1])
    line.show("1 running")
    line.close()
    expected = b"\r1 running\x1b[K\r\r\x1b[K\r"
    received = b""
    while len(received) < len(expected):  # a terminal may hand on one write at a time
        received += os.read(terminal[0], 100)
    assert received == expected


def test_a_blocked_terminal_delays_no_request(terminal: tuple[int, str]) -> None:
    line = TransientLine(terminal[1])
    for number in range(10_000):
        line.show(f"{number} running")
    line.close()


def test_at_a_terminal_of_another_user_or_without_a_name_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_fd: int) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("scheduler_proc.observe.logs.sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("scheduler_proc.observe.logs.sys.stderr.fileno", lambda: 2)
    monkeypatch.setattr("scheduler_proc.observe.logs.os.ttyname", refused)
    assert isinstance(status_line(True, lambda: dict(IDLE)), NoStatusLine)


def test_without_a_terminal_there_is_none() -> None:
    line = status_line(True, lambda: dict(IDLE))
    line.update(100.0)
    assert isinstance(line, NoStatusLine) and line.wake_at is None
    line.close()


# --- the log --------------------------------------------------------------------------------------

INTERVAL_S = 10.0


class Logged:
    """A stats log, the info that it reads, and its lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.info: dict[str, Any] = dict(IDLE)
        self.log = StatsLog(INTERVAL_S, lambda: self.info)

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]

    def at(self, now: float, **changes: Any) -> float | None:
        """Update as a scheduler step does. Return when the log wants the next update."""
        self.info |= changes
        self.log.update(now)
        return self.log.wake_at


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    return Logged(caplog)


def test_a_line_has_load_and_throughput_of_its_interval(logged: Logged) -> None:
    logged.at(50.0, generation_tokens_total=7000)
    assert logged.at(100.0, running=1) == 110.0
    logged.at(110.0, running=3, waiting=12, pages_held=74, generation_tokens_total=11120,
              prompt_tokens_total=1000, cached_tokens_total=430)  # fmt: skip
    assert logged.lines == [
        "3 running · 12 waiting · prompt 100 tok/s · generated 412 tok/s · KV 37 % · hits 43 %"
    ]


def test_many_steps_within_an_interval_are_one_line(logged: Logged) -> None:
    logged.at(100.0, running=1)
    wanted = {logged.at(100.0 + n / 100, generation_tokens_total=n) for n in range(1, 999)}
    assert wanted == {110.0} and logged.lines == []
    logged.at(110.0)
    assert len(logged.lines) == 1


def test_an_idle_server_logs_its_last_work_and_then_nothing(logged: Logged) -> None:
    assert logged.at(90.0) is None
    logged.at(100.0, running=1)
    wake_at = logged.at(102.0, running=0, generation_tokens_total=50)
    assert wake_at == 110.0
    assert logged.at(wake_at) is None
    assert [line[:40] for line in logged.lines] == ["0 running · 0 waiting · prompt 0 tok/s ·"]
    assert "generated 5 tok/s" in logged.lines[0]
    assert logged.at(500.0) is None and len(logged.lines) == 1
