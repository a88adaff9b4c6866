"""Calls without the marks of the model's form reach the clients of every API."""

from typing import Any

import pytest

from quadriga.server.answer_format import AnswerFormat, to_info
from tests.unit.http.calls import answer_of
from tests.unit.scripted_ring import HERMES, ScriptedRing

BLOCK = '```json\n{\n  "name": "weather",\n  "arguments": {"city": "Rome"}\n}\n```'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Say the weather.", "parameters": PARAMETERS}
OPENAI_TOOL = {"type": "function", "function": FUNCTION}
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Rain in Rome?"}]}
# The body of each API, and the texts by which its answers show a call and its end.
APIS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": (ASKED | {"tools": [OPENAI_TOOL]}, '"tool_calls"'),
    "/v1/responses": (
        {"model": "tiny", "input": "Rain?", "tools": [{"type": "function", **FUNCTION}]},
        '"function_call"',
    ),
    "/v1/messages": (
        ASKED | {"max_tokens": 9, "tools": [{"name": "weather", "input_schema": PARAMETERS}]},
        '"tool_use"',
    ),
    "/api/chat": (ASKED | {"tools": [OPENAI_TOOL]}, '"tool_calls"'),
}


def text_of(path: str, ring: ScriptedRing, is_stream: bool, **fields: Any) -> str:
    """Return what an API answers, without the spaces and escapes of its JSON."""
    body = APIS[path][0] | {"stream": is_stream} | fields
    answer = answer_of(ring, path, body)
    assert answer.status == 200
    return answer.text.replace(" ", "").replace("\\", "")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_a_call_in_a_block_is_a_call_in_every_api(path: str, is_stream: bool) -> None:
    text = text_of(path, ScriptedRing(list(BLOCK)), is_stream)
    assert APIS[path][1] in text and "Rome" in text and "```" not in text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", APIS)
def test_the_flag_leaves_a_block_as_text_in_every_api(path: str, is_stream: bool) -> None:
    exact = to_info(AnswerFormat(calls=HERMES, takes_tools=True, takes_unmarked=False))
    ring = ScriptedRing([BLOCK], answer_format=exact)
    text = text_of(path, ring, is_stream)
    assert "```json" in text
    assert '"tool_use"' not in text and '"finish_reason":"tool_calls"' not in text


def test_a_block_is_text_where_no_tool_may_be_called() -> None:
    without: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for fields in without:
        text = text_of("/v1/chat/completions", ScriptedRing([BLOCK]), False, **fields)
        assert '"finish_reason":"stop"' in text and "```json" in text
