"""The throughput line of the log: when it comes, and what it says."""

import logging
from typing import Any

import pytest

from scheduler_proc.observe.logs import StatsLog

INTERVAL_S = 10.0


class Logged:
    """A stats log, the info that it reads, and its lines."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.info: dict[str, Any] = {
            "running": 0,
            "waiting": 0,
            "pages_held": 0,
            "pages_total": 200,
            "generation_tokens_total": 0,
            "prompt_tokens_total": 0,
            "cached_tokens_total": 0,
        }
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
