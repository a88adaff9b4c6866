"""Traces in the formats of Mooncake and Azure, and how they are played."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli.options import parse
from bench.load.datasets import TracePace, read_requests
from quadriga.errors import ConfigError
from simulator.trace import TraceRequest, prompt_ids, write_trace

LINES: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
    {"timestamp": 1500, "input_length": 512, "output_length": 9, "hash_ids": [7], "more": "x"},
]


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_equal_ids_are_equal_tokens(tmp_path: Path) -> None:
    first, second = read_requests(write(tmp_path / "t", *LINES))
    assert first == TraceRequest(0.0, ((7, 512), (8, 188)), 5)
    assert (second.at, second.max_new_tokens, second.num_own_tokens) == (1.5, 9, 512)
    ids = [prompt_ids(request, 500, seed=0).tolist() for request in (first, second)]
    assert ids[0][:512] == ids[1] and len(ids[0]) == 700


def test_our_own_trace_format_is_recognized(tmp_path: Path) -> None:
    ours = [TraceRequest(0.5, ((1, 4),), 2)]
    write_trace(tmp_path / "t", ours)
    assert read_requests(tmp_path / "t") == ours
    found = parse(["--trace", str(write(tmp_path / "m", *LINES))]).load.workload.requests
    assert [request.at for request in found] == [0.0, 1.5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [7]}, "line 2: `hash_ids` has 1 ids: 700 tokens are 2 blocks of 512"),
        ({"output_length": 0}, r"line 2: Expected `int` >= 1 - at `\$.output_length`"),
        ({"timestamp": None}, "line 2: Expected `float`, got `null`"),
    ],
)
def test_a_line_that_cannot_be_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_requests(write(tmp_path / "t", LINES[0], LINES[0] | change))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none cannot be read: No such file"):
        read_requests(tmp_path / "none")


# The first lines of AzureLLMInferenceTrace_conv.csv (Azure Public Dataset, CC BY 4.0).
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""


def test_a_prompt_of_azures_trace_shares_nothing(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(AZURE.encode())
    first, second = read_requests(tmp_path / "t")
    assert (first.at, first.num_own_tokens, first.max_new_tokens) == (0.0, 374, 44)
    assert second.at == pytest.approx(4.314579)
    assert first.segments[0][0] != second.segments[0][0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (AZURE + "2023-11-16 18:15:50,0,9\n", r"line 4: Expected `int` >= 1"),
        (AZURE + "yesterday,7,9\n", "line 4: Invalid isoformat string: 'yesterday'"),
        (AZURE + "2023-11-16 18:15:50,7\n", "line 4: not enough values"),
        (AZURE.splitlines()[0], "has no requests"),
    ],
)
def test_a_line_of_azures_trace_that_cannot_be_is_named(
    tmp_path: Path, lines: str, message: str
) -> None:
    (tmp_path / "t").write_text(lines)
    with pytest.raises(ConfigError, match=message):
        read_requests(tmp_path / "t")


def test_copies_of_a_trace_begin_at_other_points_and_share_no_prefix() -> None:
    trace = [TraceRequest(float(at), ((at % 2, 4),), 1 + at) for at in range(9)]
    played = TracePace(speed=2.0, copies=2).play(trace)
    assert [request.at for request in played] == sorted(request.at for request in played)
    assert len(played) == 18 and max(request.at for request in played) < 4.0
    first = [request for request in played if request.segments[0][0] < 2]
    second = [request for request in played if request.segments[0][0] >= 2]
    assert len(first) == len(second) == 9
    assert {request.max_new_tokens for request in second if request.at == 0.0} == {5}
    assert len({request.segments[0][0] for request in second}) == 2
    short = TracePace(seconds=3.0).play(trace)
    assert {request.at for request in short} == {0.0, 1.0, 2.0}
    assert TracePace().play(trace) == trace


def test_what_cannot_be_played_at_another_speed_is_refused() -> None:
    with pytest.raises(ConfigError, match="--trace-speed must be positive"):
        TracePace(speed=0.0)
    chat = [TraceRequest(0.0, ((0, 4),), 1), TraceRequest(0.0, ((1, 4),), 1, follows=0)]
    with pytest.raises(ConfigError, match="has no times of its own to change"):
        TracePace(speed=2.0).play(chat)
