"""What if: the load of a server's log in simulated time, beside what the server measured."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from bench.load.server_log import load_of, measured, read_server_log
from bench.load.trace import TraceRequest
from bench.simulate import what_if
from bench.simulate.what_if import fit_slowdown, main, simulate

BEGAN_AT = 1_800_000_000.0
FLAGS = ["--max-running-requests", "2", "--num-pages", "512"]


def line(arrived_s: float, seconds: float = 2.0, **fields: Any) -> str:
    """Return a line of the log about a request of 32 prompt tokens and 11 generated ones."""
    ended_at = datetime.fromtimestamp(BEGAN_AT + arrived_s + seconds, timezone.utc)
    values = {
        "time": ended_at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "process": "scheduler_proc", "event": "scheduled", "client": "00a4", "seconds": seconds,
        "prompt_tokens": 32, "cached_tokens": 0, "generated_tokens": 11, "first_token_s": 0.5,
        "stages_s": {"queue": 0.25, "decode": 1.0}, "priority": 0, "retractions": 0,
    }  # fmt: skip
    return json.dumps(values | fields)


def write(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_log_is_read_by_arrival_and_other_lines_are_left_out(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [
        "Fatal Python error: a line that is not JSON",
        line(5.0, seconds=1.0, cached_tokens=16, client="other", priority=3),
        line(1.0, seconds=6.0),
        line(2.0, generated_tokens=0),
        line(2.0, process="http_proc", event="request"),
        '{"time": 3}',
    ])  # fmt: skip
    requests = read_server_log(log)
    first, second = load_of(requests)
    assert (first.at, first.segments, first.client) == (0.0, ((1, 32),), 0)
    assert second.at == pytest.approx(4.0)
    assert second == TraceRequest(second.at, ((0, 16), (2, 16)), 11, 1, 3)
    happened = measured(requests)
    assert happened.duration == pytest.approx(6.0, abs=0.01)
    assert happened.throughput == pytest.approx(22 / 6, abs=0.01)
    assert happened.tpot is not None and happened.tpot.p50 == pytest.approx(100.0)
    assert (happened.cached_tokens, happened.retractions) == (16, 0)
    assert [request.line.seconds for request in read_server_log(log, 2.0)] == [1.0]


def test_the_steps_are_stretched_until_a_token_takes_as_long_as_measured(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [line(0.1 * number) for number in range(20)])
    requests = read_server_log(log)
    arguments = what_if.arguments_of([str(log), *FLAGS])
    happened, load = measured(requests), load_of(requests)
    slower = simulate(arguments, load, 3.0)
    slowdown = fit_slowdown(arguments, load, happened._replace(tpot=slower.tpot))
    assert slowdown == pytest.approx(3.0, rel=0.1)
    assert fit_slowdown(arguments, load, happened._replace(tpot=None)) == 1.0


def test_each_variant_is_a_column_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log", [line(0.01 * number) for number in range(40)])
    vary = ["--vary", "8 slots: --max-running-requests 8", "--vary", "two: --replicas 2"]
    assert main([str(log), *FLAGS, *vary]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "40 requests in" in printed[1]
    for name in ("measured", "as it was", "8 slots", "two"):
        assert name in printed[2]
    waits = next(row for row in printed if row.startswith("queue wait p95")).split()[-4:]
    measured_ms, as_it_was, eight, two = map(float, waits)
    assert measured_ms == 250.0
    assert eight < as_it_was and two < as_it_was


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--vary", "8 slots"], "is no variant"),
        (["--vary", "as it was: --replicas 2"], "two columns have the name"),
        (["--vary", "x: --model y"], "--model would change nothing"),
        (["--vary", "x: --replicas 0"], "replicas must be positive"),
        (["--last", "0"], "--last is 0.0: give seconds"),
    ],
)
def test_wrong_flags_are_an_error_in_a_line(
    flags: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log", [line(0.0), line(1.0)])
    assert main([str(log), *flags]) == 2
    assert reason in capsys.readouterr().err


def test_a_log_without_requests_says_how_to_get_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(write(tmp_path / "log", ["12:00:00 launcher INFO ready"]))]) == 2
    assert "--log-format json and --log-requests" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
