"""The comparison of several servers: its command line and its table."""

from pathlib import Path

import pytest

from bench.client.load_generator import RequestRecord
from bench.client.resources import Cost
from bench.client.server import LAUNCHER
from bench.compare import table, variants_of
from bench.report.metrics import summarize
from bench.report.report import Result
from bench.turns import Turns
from quadriga.errors import ConfigError


def result(tokens_per_second: float) -> Result:
    times = [100.0 + i / tokens_per_second for i in range(1, 11)]
    record = RequestRecord(
        0, submit_start=100.0, submit_end=100.0, received=100.0, tokenized=100.0,
        admitted=100.0, first_token=times[0], finished=times[-1], token_times=times, arrivals=times,
        prompt_tokens=5, completion_tokens=10, finish_reason="length",
    )  # fmt: skip
    cost = Cost(10, 0.9, None, None, {"worker_proc/0": 1e-3, "worker_proc/1": 1e-3})
    return Result(summarize([record], 0.0), cost, [record], {})


def test_a_variant_takes_the_common_flags_and_its_own() -> None:
    variants = variants_of(
        ["a: --batch-mode mixed", "b:--decode-first", "--", "--num-requests", "3"]
    )
    assert list(variants) == ["a", "b"]
    server = variants["b"].target.config
    assert server is not None and server.scheduler.mode == "decode-first"
    assert len(variants["a"].load.workload.requests) == 3


def test_a_variant_of_another_checkout_has_the_launcher_of_that(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").touch()
    variants = variants_of(["old: @" + str(tmp_path), "new: --seed 3", "--", "--num-requests", "3"])
    assert variants["old"].target.launcher == tmp_path / "launcher.py"
    assert variants["new"].target.launcher == LAUNCHER


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["a: @nowhere", "b: "], "directory of a checkout"),
        (["a: ", "--"], "at least two"),
        (["a", "b: "], 'write "NAME: FLAGS"'),
        (["a: ", "b: --batch-mode nonsense"], "invalid choice"),
        (["a: ", "b: ", "--", "--endpoint", "tcp://127.0.0.1:5555"], "leave it out"),
    ],
)
def test_a_command_line_that_compares_nothing_is_refused(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        variants_of(argv)


def test_the_table_shows_medians_and_the_ratio_of_throughputs() -> None:
    turns: Turns[Result] = Turns(["slow", "fast"])
    turns.results["slow"] = [result(9), result(10), result(50)]
    turns.results["fast"] = [result(18), result(20), result(75)]
    text = table(turns)
    assert "| tok/s | 10 | 20, 2.00 (1.50 to 2.00) x |" in text
    assert "| TTFT p50 | 100 | 50 |" in text
    assert "| CPU us/token worker_proc | 200.0 | 200.0 |" in text
