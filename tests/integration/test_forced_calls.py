"""Forced calls through the whole server, in the forms of several models.

The weights are random: whatever the grammar allows is written.
"""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.everything import more
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


# JSON and another form; tests/unit/http/test_call_grammars.py writes and reads all.
@pytest.fixture(
    params=["hermes", "gemma4", more("mistral"), more("qwen3_coder"), more("pythonic")],
    scope="module",
)
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    tmp_path = tmp_path_factory.mktemp("forced")
    directory = tiny_llama(tmp_path / "model", max_position_embeddings=4096)
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
                       "tool_choice": "required", "max_tokens": 1500}  # fmt: skip
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


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_strict_tool_that_no_grammar_can_enforce_is_refused_by_name_and_keyword(
    client: openai.OpenAI, tool_choice: Any
) -> None:
    tags = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "format": "path"}, "tags": tags},
        "required": ["path"],
        "additionalProperties": False,
    }
    save: Any = {"name": "save", "parameters": parameters, "strict": True}
    tools: Any = [
        {"type": "function", "function": {"name": "other"}},
        {"type": "function", "function": save},
    ]
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "tools": tools}
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\] \(save\).*[ .]format"):
        client.chat.completions.create(**ask, tool_choice=tool_choice)
    save["strict"] = False
    del tools[0]
    call = client.chat.completions.create(**ask, tool_choice="required", seed=1, max_tokens=200)
    (made,) = call.choices[0].message.tool_calls or []
    assert made.type == "function" and '"path"' in made.function.arguments


def test_large_integers_of_schemas_are_exact(client: openai.OpenAI) -> None:
    for number in (1234567890123456789, 2**70 + 1, 2**53 + 1):
        properties: Any = {
            "id": {"enum": [number]},
            "n": {"type": "integer", "minimum": number, "maximum": number},
        }
        schema: Any = {
            "type": "object",
            "properties": properties,
            "required": ["id", "n"],
            "additionalProperties": False,
        }
        lax: Any = {"name": "s", "schema": schema}
        forms: list[dict[str, Any]] = [
            {"type": "json_schema", "json_schema": lax},
            {"type": "json_schema", "json_schema": {**lax, "strict": True}},
        ]
        tool: Any = {"type": "function", "function": {"name": "get", "parameters": schema}}
        asked: list[dict[str, Any]] = [
            *({"response_format": form} for form in forms),
            {"extra_body": {"guided_json": schema}},
            {"tools": [tool], "tool_choice": "required"},
        ]
        for fields in asked:
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hello!"}],
                max_tokens=300,
                seed=2,
                **fields,
            )
            message = answer.choices[0].message
            calls: Any = message.tool_calls
            text = calls[0].function.arguments if calls else message.content
            assert json.loads(text) == {"id": number, "n": number}
