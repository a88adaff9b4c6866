"""Forced calls through the whole server, in the forms of several models.

The weights are random: whatever the grammar allows is written.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.gateway import MODEL, running_gateway
from tests.server import running_server
from tests.tiny_models import tiny_llama

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "exact": {"type": "boolean"}},
            "required": ["city", "exact"],
            "additionalProperties": False,
        },
    },
}
HELLO: Any = [{"role": "user", "content": "Hello!"}]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["hermes", "mistral", "qwen3_coder", "pythonic", "gemma4"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[openai.OpenAI]:
    directory = tiny_llama(tmp_path / "model", max_position_embeddings=1024)
    flags = ["--model", str(directory), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--tool-call-parser", request.param]
    with (
        running_server(tmp_path / "log", *flags) as server,
        running_gateway(server.endpoint, directory) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client


def test_forced_calls_are_parsed_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    for seed in range(3):
        fields: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "seed": seed,
                       "tool_choice": {"type": "function", "function": {"name": "weather"}},
                       "max_tokens": 200}  # fmt: skip
        choice = client.chat.completions.create(**fields).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        given = json.loads(call.function.arguments)
        assert given["city"] in ("Rome", "Oslo") and given["exact"] in (True, False)
        with client.chat.completions.stream(**fields) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
        assert json.loads(streamed.function.arguments) == given


def test_forced_answers_end_where_a_call_is_repeated(client: openai.OpenAI) -> None:
    """There are four different calls, and random weights do not end by themselves."""
    num_ended = 0
    for seed in range(4):
        fields: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL], "seed": seed,
                       "tool_choice": "required", "max_tokens": 900}  # fmt: skip
        answer = client.chat.completions.create(**fields)
        choice, usage = answer.choices[0], answer.usage
        given = [call.function.arguments for call in choice.message.tool_calls or []]
        parsed = [json.dumps(json.loads(each)) for each in given]
        assert 1 <= len(set(parsed)) == len(parsed) <= 4
        assert choice.message.content is None
        with client.chat.completions.stream(
            **fields, stream_options={"include_usage": True}
        ) as stream:
            streamed = stream.get_final_completion()
        calls: Any = streamed.choices[0].message.tool_calls
        assert [call.function.arguments for call in calls] == given
        assert streamed.choices[0].finish_reason == choice.finish_reason
        assert usage is not None and streamed.usage is not None
        assert streamed.usage.completion_tokens == usage.completion_tokens
        num_ended += choice.finish_reason == "tool_calls"
    assert num_ended, "at least one of them has come to a repeat"


def test_a_forced_function_without_parameters_gets_none(client: openai.OpenAI) -> None:
    empty: list[dict[str, Any]] = [{}, {"type": "object", "properties": {}}]
    for parameters in ({}, *({"parameters": each} for each in empty)):
        tool: Any = {"type": "function", "function": {"name": "now", **parameters}}
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[tool], tool_choice="required", max_tokens=300
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function" and json.loads(call.function.arguments) == {}
        assert answer.choices[0].finish_reason == "tool_calls"
