"""What if: the load of a server's log in simulated time, beside what the server measured."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.simulate.what_if import main
from quadriga.errors import ConfigError
from quadriga.wire.what_if import FlagVariant, MeasuredChoice, WhatIfJob
from simulator.cost_model import CostModel
from simulator.flags import config_of, model_of, num_pages_of, world_arguments
from simulator.records import Records
from simulator.trace import TraceRequest
from simulator.what_if import (
    PROMPT_WORK,
    answer,
    fit_slowdown,
    load_of,
    measured,
    read_server_log,
    replay,
)
from simulator.world import World

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
    (last,) = read_server_log(log, 2.0)
    assert last.ended_at - last.received_at == pytest.approx(1.0)


def test_the_steps_are_stretched_until_a_token_takes_as_long_as_measured(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [line(0.1 * number) for number in range(20)])
    requests = read_server_log(log)
    arguments = world_arguments(FLAGS)
    happened, load, model = measured(requests), load_of(requests), model_of(arguments)
    slower = happened._replace(tpot=replay(arguments, load, 3.0, model).figures.tpot)
    assert fit_slowdown(arguments, load, slower, model) == pytest.approx(3.0, rel=0.1)
    unknown = happened._replace(tpot=None)
    assert fit_slowdown(arguments, load, unknown, model) == 1.0


def served(num_requests: int, model: CostModel) -> list[MeasuredChoice]:
    """Return what a server would measure whose steps are as long as a model says."""
    arguments = world_arguments(FLAGS)
    config = config_of(arguments)
    num_pages, method = num_pages_of(arguments, config, model), arguments.load_balance_method
    world = World(config, model, num_pages, arguments.replicas, method)
    load = [
        TraceRequest(0.4 * number, ((number, 60 + 37 * (number % 9)),), 12 + number % 20)
        for number in range(num_requests)
    ]
    world.run(enumerate(load))
    columns = [world.records[name].tolist() for name in Records.TIMES]
    rows = [
        [*times, request.segments[0][1], 0, request.max_new_tokens, 0, ""]
        for request, *times in zip(load, *columns, strict=True)
    ]
    return [MeasuredChoice(*row) for row in rows]


@pytest.mark.parametrize(("prompt", "step"), [(3.0, 0.7), (0.4, 2.0), (1.5, 1.5)])
def test_a_server_with_other_prices_of_prompts_and_tokens_is_simulated_within_a_tenth(
    prompt: float, step: float
) -> None:
    model = model_of(world_arguments(FLAGS))
    ms = {name: ms * (prompt if name in PROMPT_WORK else 1.0) for name, ms in model.ms.items()}
    choices = served(60, msgspec.structs.replace(model, ms=ms, slowdown=step))
    found = answer(WhatIfJob(choices, FLAGS, [], 8192, "cpu"))
    assert found.doubt == ""
    was, simulated = found.columns
    for name in ("ttft", "tpot", "latency"):
        assert getattr(simulated, name).p95 == pytest.approx(getattr(was, name).p95, rel=0.1)


def test_it_says_where_it_cannot_tell() -> None:
    choices = served(60, model_of(world_arguments(FLAGS)))
    few = answer(WhatIfJob(choices[:5], FLAGS, [], 8192, "cpu"))
    assert few.doubt == "5 requests were measured, and it takes 20 at least"
    for place in range(30, 36):
        names = ("first_token_at", "last_token_at", "ended_at")
        later = {name: getattr(choices[place], name) + 9.0 for name in names}
        choices[place] = msgspec.structs.replace(choices[place], **later)
    halted = answer(WhatIfJob(choices, FLAGS, [], 8192, "cpu"))
    assert "the p95 time to first token is" in halted.doubt


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


def test_the_job_of_a_server_has_the_columns_and_the_requests_in_flight() -> None:
    choices = [
        MeasuredChoice(at, at, at + 1, at + 1.1, at + 1.5, at + 1.5, 64, 32, 5, 0, "")
        for at in (100.0, 100.5, 101.0)
    ]
    one = FlagVariant("one", ["--max-running-requests", "1"])
    found = answer(WhatIfJob(choices, ["--max-running-requests", "8"], [one], 512, "cpu"))
    assert [column.name for column in found.columns] == ["measured", "as it was", "one"]
    measured_column = found.columns[0]
    assert found.duration_s == pytest.approx(2.5)
    assert max(measured_column.waiting) == 2 and max(measured_column.running) == 1
    assert measured_column.waiting[-1] == measured_column.running[-1] == 0
    assert found.columns[1].tpot is not None
    assert found.columns[1].tpot.p50 == pytest.approx(100, rel=0.3)


def test_flags_that_do_not_go_together_are_an_error_of_the_job() -> None:
    choices = [MeasuredChoice(1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 8, 0, 4, 0, "")]
    wrong = FlagVariant("x", ["--batching", "static", "--batch-mode", "alternate"])
    with pytest.raises(ConfigError, match="contradicts --batch-mode alternate"):
        answer(WhatIfJob(choices, [], [wrong], 512, "cpu"))


def test_a_fit_ends_also_where_a_longer_step_makes_tokens_much_slower(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [line(0.05 * number) for number in range(60)])
    requests = read_server_log(log)
    arguments = world_arguments(FLAGS)
    happened, load, model = measured(requests), load_of(requests), model_of(arguments)
    slowdown = fit_slowdown(arguments, load, happened, model)
    tpot = replay(arguments, load, slowdown, model).figures.tpot
    assert tpot is not None and happened.tpot is not None
    assert tpot.p50 == pytest.approx(happened.tpot.p50, rel=0.1)
