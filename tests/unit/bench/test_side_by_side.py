"""The loads and the tables of bench.simulate.side_by_side."""

from pathlib import Path

import pytest

from bench.load.mixed_prompts import LONG_CLIENT, LONG_INPUT, long_among_short, mooncake_like
from bench.load.trace import read_trace
from bench.simulate import side_by_side


def test_the_short_prompts_are_the_same_without_long_ones() -> None:
    alone, mixed = long_among_short(50, 2.0, 0), long_among_short(50, 2.0, 2)
    long = [request for request in mixed if request.client == LONG_CLIENT]
    assert [request for request in mixed if request.client != LONG_CLIENT] == alone
    assert [request.num_own_tokens for request in long] == [LONG_INPUT] * 2


def test_some_prompts_of_the_trace_begin_like_earlier_ones() -> None:
    requests = list(mooncake_like(200, 1.0))
    first_segments = [request.segments[0] for request in requests]
    assert len(set(first_segments)) < len(first_segments)
    assert requests == list(mooncake_like(200, 1.0))


def test_side_by_side_short_prompts_wait_a_fraction_of_the_time() -> None:
    requests = long_among_short(60, 2.0, 1)
    short = [index for index, request in enumerate(requests) if request.client != LONG_CLIENT]
    one, side = (side_by_side.serve(requests, flags) for flags in (side_by_side.ONE, {}))
    assert side.ttft_ms[short].max() < one.ttft_ms[short].max() / 4
    assert side.tokens_per_s > 0.97 * one.tokens_per_s


def test_it_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-requests", "30", "--rates", "2", "--mooncake-rates", "0.6"]
    assert side_by_side.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("one after the other") for line in lines) == 2
    assert sum("ttft_target 2" in line for line in lines) == 1


def test_it_writes_the_loads(tmp_path: Path) -> None:
    flags = ["--num-requests", "30", "--write-traces", str(tmp_path)]
    assert side_by_side.main(flags) == 0
    assert len(read_trace(tmp_path / "long-among-short.jsonl")) == 31
    assert len(read_trace(tmp_path / "mooncake-like.jsonl")) == 30


def test_a_wrong_number_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert side_by_side.main(["--num-requests", "0"]) == 2
    assert "--num-requests is 0: it must be positive" in capsys.readouterr().err
