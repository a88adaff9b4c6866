"""Traces in Mooncake's format."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli.options import parse
from bench.load.datasets import read_requests
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
