"""The input file of a batch: what is refused, line by line."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from http_proc.core.call import Call
from http_proc.jobs import batch_lines
from http_proc.jobs.batch_job import LOWEST_PRIORITY
from http_proc.jobs.batch_lines import FileCheck, read_lines

URL = "/v1/completions"


def line(custom_id: object = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"prompt": "x"}}
    return json.dumps({**fields, **changes}).encode()


def checked(tmp_path: Path, *lines: bytes) -> tuple[int, list[tuple[str, int | None]]]:
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(lines))
    check = FileCheck(path, URL, 1000)
    for _ in check.steps():
        pass
    return check.num_lines, [(error.code, error.line) for error in check.errors]


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    assert checked(tmp_path, b"\xef\xbb\xbf" + line("a"), b"", b" \r", line("b")) == (2, [])
    numbers = [one.number for one in read_lines(tmp_path / "input", URL, 1000)]
    assert numbers == [1, 4]


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[" * 5000, "line_too_long"),
        (b"[" * 900, "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (line(None), "invalid_custom_id"),
        (line(""), "invalid_custom_id"),
        (line(7), "invalid_json_line"),
        (line("x" * 600), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/embeddings"), "mismatched_url"),
        (line(body=[1]), "invalid_body"),
        (line(body=None), "invalid_body"),
        (line(body={"stream": True}), "stream_not_supported"),
        (line("first"), "duplicate_custom_id"),
        (line("long", body={"prompt": "x" * 2000}), "line_too_long"),
    ],
)
def test_a_bad_line_is_named_with_its_number(tmp_path: Path, bad: bytes, code: str) -> None:
    assert checked(tmp_path, line("first"), bad, line("last")) == (3, [(code, 2)])


def test_an_empty_file_and_one_with_too_many_lines_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(tmp_path, b"", b"\n") == (0, [("empty_file", None)])
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    lines = [line(str(number)) for number in range(5)]
    assert checked(tmp_path, *lines) == (3, [("too_many_requests", 3)])


def test_the_check_ends_after_many_errors(tmp_path: Path) -> None:
    total, errors = checked(tmp_path, *[b"{"] * 500)
    assert total == len(errors) == batch_lines.MAX_ERRORS


@pytest.mark.parametrize("body", [b"{}", b'{"a":1}', b'{ "priority": 5 } ', b'{"a":{"b":[]}}'])
def test_a_body_gets_the_lowest_priority(body: bytes) -> None:
    expected = json.loads(body) | {"priority": -1000}
    call = Call("/v1/completions", body, "id", priority=LOWEST_PRIORITY)
    assert asyncio.run(call.parse()) == expected


def test_the_check_of_a_long_file_gives_its_thread_back_between_short_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_lines, "STEP_S", 0.0)
    path = tmp_path / "input"
    path.write_bytes(b"\n".join(line(str(number)) for number in range(50)))
    check = FileCheck(path, URL, 1000)
    assert [check.num_lines for _ in check.steps()] == list(range(1, 51))
    assert check.errors == []
