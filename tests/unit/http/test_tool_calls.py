"""Tool calls are parsed however the text is cut, and everything else stays text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from http_proc.protocol.tool_calls import ID_LENGTH, ToolFormat, make_parser

HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
MISTRAL = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'
ROME = ("weather", {"city": "Rome"})


def parse(tool_format: str, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = make_parser(ToolFormat(tool_format))
    parts = [parser.push(piece) for piece in pieces] + [parser.finish()]
    calls = [call for part in parts for call in part.calls]
    assert all(len(call.id) == ID_LENGTH for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    names = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    return "".join(part.text for part in parts), names


@pytest.mark.parametrize(
    ("tool_format", "text", "rest", "calls"),
    [
        ("hermes", HERMES, "", [ROME]),
        ("hermes", f"Let me see. {HERMES}\n{HERMES}", "Let me see. ", [ROME, ROME]),
        ("hermes", HERMES.removesuffix("</tool_call>"), "", [ROME]),
        ("hermes", "a < b, <tool>, <tool_", "a < b, <tool>, <tool_", []),
        ("hermes", "<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", []),
        ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
        ("mistral", MISTRAL, "", [ROME]),
        ("mistral", f"Well. {MISTRAL}", "Well. ", [ROME]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", [ROME]),
        ("mistral", '[TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]weather{"city": "Rome"}', "",
         [ROME, ROME]),
        ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
        ("mistral", "[TOOL", "[TOOL", []),
        ("llama3", LLAMA, "", [ROME]),
        ("llama3", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [ROME, ROME]),
        ("llama3", "Just text {", "Just text {", []),
        ("llama3", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3", '{"name": "weather"', '{"name": "weather"', []),
        ("llama3", "<|python", "<|python", []),
    ],
)  # fmt: skip
def test_calls_and_text_are_separated_for_every_cut(
    tool_format: str, text: str, rest: str, calls: list[tuple[str, object]]
) -> None:
    assert parse(tool_format, [text]) == (rest, calls)
    assert parse(tool_format, list(text)) == (rest, calls)
    for cut in range(len(text)):
        assert parse(tool_format, [text[:cut], text[cut:]]) == (rest, calls)


@given(
    st.sampled_from(["hermes", "mistral", "llama3"]),
    st.lists(st.text(alphabet='ab{}[]<>/":;| \n_toul_callTOOLCS', max_size=8), max_size=12),
)
def test_text_that_holds_no_call_comes_back_unchanged(tool_format: str, pieces: list[str]) -> None:
    text, calls = parse(tool_format, pieces)
    if not calls and tool_format != "llama3":
        assert text == "".join(pieces)
    if not calls and tool_format == "llama3":
        assert text == "".join(pieces).removeprefix("<|python_tag|>")


def test_broken_and_deep_json_is_text() -> None:
    deep = "<tool_call>" + "[" * 100_000 + "</tool_call>"
    assert parse("hermes", [deep]) == (deep, [])
