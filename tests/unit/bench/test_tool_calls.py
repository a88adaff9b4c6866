"""Calls are graded by the rules of the leaderboard."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.tool_calls import AllowedCall, Case, WrittenCall, calls_in_text, is_right, read_cases
from quadriga.errors import ConfigError

FUNCTION = {
    "name": "shop.order",
    "description": "Order something.",
    "parameters": {
        "type": "dict",
        "properties": {
            "item": {"type": "string"},
            "count": {"type": "integer"},
            "price": {"type": "float"},
            "sizes": {"type": "array", "items": {"type": "string"}},
            "prices": {"type": "array", "items": {"type": "float"}},
            "address": {"type": "dict", "properties": {"city": {"type": "string"}}},
            "is_gift": {"type": "boolean"},
        },
        "required": ["item", "count"],
    },
}
ALLOWED: dict[str, list[Any]] = {
    "item": ["Blue shirt", "shirt"],
    "count": [2],
    "price": [10.0, ""],
    "sizes": [["S", "M"], ""],
    "prices": [[1.0, 2.5], ""],
    "address": [{"city": ["New York"], "zip": ["", "10001"]}, ""],
    "is_gift": [True, ""],
}
RIGHT: dict[str, Any] = {"item": "shirt", "count": 2}


def case(*expected: dict[str, Any]) -> Case:
    calls: list[AllowedCall] = [{"shop.order": ALLOWED | each} for each in expected or ({},)]
    return Case("case", [], [FUNCTION], calls)


def call(**arguments: Any) -> WrittenCall:
    return WrittenCall("shop_order", RIGHT | arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"item": "BLUE-shirt."},
        {"price": 10},
        {"sizes": ["s", "m"]},
        {"prices": [1.0, 2.5]},
        {"address": {"city": "new york"}},
        {"address": {"city": "New York", "zip": "10001"}},
        {"is_gift": True},
    ],
)
def test_allowed_values_are_right(arguments: dict[str, Any]) -> None:
    assert is_right(case(), [call(**arguments)])


@pytest.mark.parametrize(
    "arguments",
    [
        {"item": "red shirt"},
        {"count": 3},
        {"count": 2.0},
        {"count": "2"},
        {"price": "10"},
        {"sizes": ["M", "S"]},
        {"sizes": "S, M"},
        {"prices": [1, 2.5]},
        {"address": {"zip": "10001"}},
        {"address": {"city": "New York", "street": "Broadway"}},
        {"is_gift": 1},
        {"color": "blue"},
    ],
)
def test_other_values_types_and_arguments_are_wrong(arguments: dict[str, Any]) -> None:
    assert not is_right(case(), [call(**arguments)])


def test_a_call_needs_the_name_and_the_required_arguments() -> None:
    assert not is_right(case(), [WrittenCall("order", RIGHT)])
    assert not is_right(case(), [WrittenCall("shop_order", {"item": "shirt"})])


def test_there_are_as_many_calls_as_expected_in_any_order() -> None:
    both = case({}, {"count": [5]})
    assert is_right(both, [call(count=5), call()])
    assert not is_right(both, [call()])
    assert not is_right(both, [call(), call()])
    assert not is_right(case(), [call(), call()])
    assert not is_right(case(), [])


def test_calls_are_found_in_any_text() -> None:
    found = {"name": "shop_order", "arguments": RIGHT}
    text = f"Sure {{here}}:\n```json\n{json.dumps(found)}\n```\n[{json.dumps(found)}] {{"
    assert calls_in_text(text, [FUNCTION]) == [call(), call()]
    assert calls_in_text('{"name": "other", "arguments": {}}', [FUNCTION]) == []


def test_cases_are_read_with_their_answers(tmp_path: Path) -> None:
    question = {"id": "multiple_0", "question": [[{"role": "user", "content": "Hi"}]]}
    answer = {"id": "multiple_0", "ground_truth": [{"shop.order": ALLOWED}]}
    (tmp_path / "possible_answer").mkdir()
    for directory, row in (
        (tmp_path, {**question, "function": [FUNCTION]}),
        (tmp_path / "possible_answer", answer),
    ):
        (directory / "BFCL_v4_multiple.json").write_text(json.dumps(row) + "\n")
    (read,) = read_cases(tmp_path, "multiple", 5)
    assert is_right(read, [call()])
    with pytest.raises(ConfigError, match="--data"):
        read_cases(tmp_path, "simple", 5)
