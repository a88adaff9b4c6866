"""The search for a request rate: limits, bisection, the fit to a run, and the whole command."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.capacity import __main__ as capacity
from bench.capacity.__main__ import (
    Answer,
    LatencyTarget,
    Point,
    Simulation,
    are_kept,
    document,
    highest_rate,
    text,
)
from bench.client.load_generator import RequestRecord
from bench.client.resources import Cost
from bench.client.server import free_port
from bench.load.synthetic import Lengths, TraceSpec
from bench.report.metrics import Summary, summarize
from bench.report.report import Result
from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig
from simulator import cost_model
from simulator.cost_model import CostModel, MeasuredOn
from simulator.latency import Percentiles
from tests.unit.fake_server import FakeServer

MODEL = CostModel(
    ms={"steps": 10.0, "tokens": 1.0},
    measured_on=MeasuredOn(
        model="tiny", dtype="float32", device="cpu", threads=1, date="2026-01-01",
        vocab_size=1000, context_length=256, max_total_tokens=65536,
    ),
)  # fmt: skip
LOAD = TraceSpec(100, Lengths(8, 8), Lengths(16, 16), request_rate=2.0)
TARGETS = [LatencyTarget("ttft", "p99", 500.0), LatencyTarget("tpot", "p50", 40.0)]


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate few requests per rate."""
    monkeypatch.setattr(capacity, "MIN_SIMULATED", 20)
    monkeypatch.setattr(capacity, "MAX_SIMULATED", 60)


def spread(ms: float) -> Percentiles:
    return Percentiles(10, ms, ms, ms, ms, ms)


def summary(ttft: float = 100.0, failed: int = 0) -> Summary:
    """Return the summary of 100 requests with all latencies at one value in ms."""
    empty = summarize([RequestRecord(0, 1.0, 1.0, finished=2.0)], 0.0)
    spreads: dict[str, Any] = {"ttft": spread(ttft), "tpot": spread(20.0), "latency": spread(400.0)}
    spreads |= {name: spread(1.0) for name in ("to_server", "tokenize", "delivery")}
    return dataclasses.replace(empty, requests=100, failed=failed, **spreads)


def result(of: Summary) -> Result:
    return Result(of, Cost(0, 0.0, 0.0, 0.0, {}), [], {"step_gap_ms_p50": 0.1})


@pytest.mark.parametrize(
    "wrong", ["ttft:500", "ttft_p98:5", "load_p99:5", "ttft_p99:0", "ttft_p99"]
)
def test_a_limit_names_metric_percentile_and_ms(wrong: str) -> None:
    assert LatencyTarget.parse("e2el_mean:2.5") == LatencyTarget("e2el", "mean", 2.5)
    with pytest.raises(ConfigError, match="such as ttft_p99:500"):
        LatencyTarget.parse(wrong)


def test_a_run_is_within_the_limits_if_every_percentile_is_and_few_requests_failed() -> None:
    assert are_kept(TARGETS, summary())
    assert are_kept(TARGETS, summary(failed=1))
    assert not are_kept(TARGETS, summary(ttft=501.0))
    assert not are_kept(TARGETS, summary(failed=2))


@pytest.mark.parametrize("limit", [0.02, 0.9, 1.0, 13.7, 3000.0])
def test_bisection_finds_the_highest_rate(limit: float) -> None:
    found = highest_rate(lambda rate: rate <= limit)
    assert found is not None
    assert limit / capacity.PRECISION <= found <= limit


def test_no_rate_beyond_the_highest_one_is_found() -> None:
    assert highest_rate(lambda rate: rate <= 2 * capacity.MAX_RATE) == capacity.MAX_RATE


def test_bisection_finds_nothing_where_nothing_holds() -> None:
    assert highest_rate(lambda rate: False) is None


def test_the_highest_rate_of_a_simulation_is_near_its_saturation() -> None:
    simulation = Simulation(ServerConfig(), MODEL, LOAD)
    targets = [LatencyTarget("ttft", "p99", 200.0)]
    found = highest_rate(lambda rate: are_kept(targets, simulation.at(rate)))
    assert found is not None
    assert are_kept(targets, simulation.at(found))
    assert not are_kept(targets, simulation.at(1.5 * found))


def test_a_fitted_simulation_has_the_measured_latency() -> None:
    simulation = Simulation(ServerConfig(), MODEL, LOAD)
    before = simulation.run(LOAD).latency
    fitted = simulation.fitted_to(LOAD, result(summary())).run(LOAD).latency
    assert before is not None and fitted is not None
    assert abs(before.mean - 400) > 100
    assert fitted.mean == pytest.approx(400, rel=0.1)


def test_a_fit_to_a_run_near_saturation_has_the_measured_latency() -> None:
    busy = dataclasses.replace(LOAD, request_rate=12.0)
    measured = result(dataclasses.replace(summary(), latency=spread(3000.0)))
    fitted = Simulation(ServerConfig(), MODEL, busy).fitted_to(busy, measured).run(busy).latency
    assert fitted is not None
    assert fitted.mean == pytest.approx(3000, rel=0.25)


def answer() -> Answer:
    simulation = Simulation(ServerConfig(), MODEL, LOAD)
    points = [Point(10.0, summary()), Point(13.0, summary(ttft=900.0))]
    points += [Point(rate, simulation.at(rate)) for rate in (5.0, 10.0)]
    return Answer(TARGETS, "tiny on cpu (float32)", "prompts of 16 tokens", 10.0, True, points)


def test_the_answer_is_one_line_and_a_table() -> None:
    lines = text(answer()).splitlines()
    assert lines[0] == "10 requests/s within TTFT p99 500 ms, TPOT p50 40 ms (measured)"
    assert lines[1] == "at 1.3 times the rate it was beyond them (measured)"
    kinds = [line.split()[:2] for line in lines[6:]]
    assert kinds == [
        ["5.00", "simulated"], ["10.00", "simulated"], ["10.00", "measured"], ["13.00", "measured"],
    ]  # fmt: skip
    assert lines[-1].endswith("no") and lines[-2].endswith("yes")
    points = document(answer())["points"]
    assert [point["within"] for point in points[:2]] == [True, False]
    assert points[0]["ttft_p99"] == 100.0


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer(f"tcp://127.0.0.1:{free_port()}")
    fake.start()
    yield fake
    fake.stopping = True
    fake.join()


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    cost_model.save(tmp_path / "model.json", MODEL)
    return tmp_path / "model.json"


def test_the_command_predicts_and_verifies_a_rate(
    server: FakeServer,
    model_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(capacity, "PROBE_S", 0.1)
    out = tmp_path / "out.json"
    flags = f"--slo ttft_p99:5000 --endpoint {server.endpoint} --cost-model {model_file}"
    flags += f" --verify-seconds 0.01 --max-new-tokens 2 --json {out}"
    assert capacity.main(flags.split()) == 0
    written = json.loads(out.read_text())
    measured = [point for point in written["points"] if point["measured"]]
    assert written["verified"]
    assert measured[1]["request_rate"] == pytest.approx(1.3 * measured[0]["request_rate"])
    assert max(point["request_rate"] for point in measured if point["within"]) == pytest.approx(
        written["request_rate"]
    )
    assert "requests/s within TTFT p99 5000 ms (measured)" in capsys.readouterr().out


def test_limits_that_no_rate_can_hold_are_explained(
    server: FakeServer, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(capacity, "PROBE_S", 0.1)
    monkeypatch.setattr(capacity, "LOWEST_PROBE_RATE", 50.0)
    out = tmp_path / "out.json"
    flags = f"--slo ttft_p50:0.0001 --endpoint {server.endpoint} --cost-model {model_file}"
    assert capacity.main([*flags.split(), "--json", str(out)]) == 1
    assert "no rate is within TTFT p50 0.0001 ms: " in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["request_rate"] is None
    assert [point["within"] for point in written["points"]] == [False]


def test_a_rate_that_a_real_run_held_is_found_where_the_simulator_says_that_there_is_none(
    server: FakeServer, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "PROBE_S", 0.1)
    answers = iter([50.0, 1e6])
    monkeypatch.setattr(capacity, "highest_rate", lambda _: next(answers, None))
    tried: list[float] = []

    async def run(_: Any, rate: float, seconds: float) -> tuple[TraceSpec, Result]:
        tried.append(rate)
        return LOAD, result(summary(ttft=100.0 if rate <= 200 else 9000.0))

    monkeypatch.setattr(capacity.RealServer, "run", run)
    out = tmp_path / "out.json"
    flags = f"--slo ttft_p99:5000 --endpoint {server.endpoint} --cost-model {model_file}"
    assert capacity.main([*flags.split(), "--json", str(out)]) == 0
    assert tried == [20.0, 1e6, 20.0, 26.0]
    assert json.loads(out.read_text())["request_rate"] == 26.0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "--slo"),
        ("--slo ttft:5", "ttft_p99:500"),
        ("--slo ttft_p99:5 --verify-seconds 0", "verify_seconds must be positive"),
        ("--slo ttft_p99:5 --json /no/such/place/x.json", "there is no directory"),
        ("--slo ttft_p99:5 --request-rate 5", "there is no flag --request-rate"),
    ],
)
def test_flags_that_cannot_work_are_refused_in_one_line(
    flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capacity.main(flags.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
