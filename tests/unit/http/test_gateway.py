"""Answers of the gateway for a ring that calls tools, fails, is slow or stops."""

import asyncio
import json
from typing import Any

import openai
import pytest

from quadriga.errors import (
    DeadlineExceeded,
    QuadrigaError,
    QueueFull,
    QuotaExceeded,
    RequestFailed,
    ServerFailed,
    ServerStopping,
)
from quadriga.server.answer_format import AnswerFormat, to_info
from tests.unit.scripted_ring import ASK, LLAMA3, ScriptedRing, chunk, openai_before

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CALLING = ["Let me ", "see.", "<tool", "_call>", *list(CALL.removeprefix("<tool_call>")), "\n"]


async def test_a_tool_call_is_parsed_out_of_an_answer() -> None:
    ring = ScriptedRing(CALLING)
    async with openai_before(ring) as (client, _):
        answer = await client.chat.completions.create(**ASK, tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        assert ring.submitted[0][2]["chat"].tools[0]["function"]["name"] == "weather"


def names_of(deltas: list[Any]) -> list[tuple[int, str]]:
    """Return the index and the name of each call that begins."""
    return [(call.index, call.function.name) for call in deltas if call.id]


async def test_a_tool_call_is_streamed_in_deltas_and_never_as_text() -> None:
    async with openai_before(ScriptedRing(CALLING)) as (client, _):
        text, reasons = "", []
        calls: list[Any] = []
        async for part in await client.chat.completions.create(**ASK, tools=TOOLS, stream=True):
            delta = part.choices[0].delta
            text += delta.content or ""
            calls += delta.tool_calls or []
            reasons.append(part.choices[0].finish_reason)
        assert text == "Let me see."
        assert names_of(calls) == [(0, "weather")]
        arguments = "".join(call.function.arguments for call in calls)
        assert json.loads(arguments) == {"city": "Rome"}
        assert reasons[-1] == "tool_calls"


async def test_with_one_call_at_a_time_the_others_are_left_out() -> None:
    async with openai_before(ScriptedRing([CALL, CALL])) as (client, _):
        fields = {**ASK, "tools": TOOLS, "parallel_tool_calls": False}
        answer = await client.chat.completions.create(**fields)
        assert len(answer.choices[0].message.tool_calls or []) == 1
        calls: list[Any] = []
        async for part in await client.chat.completions.create(**fields, stream=True):
            calls += part.choices[0].delta.tool_calls or []
        assert names_of(calls) == [(0, "weather")]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
async def test_a_forced_call_is_asked_for_by_a_grammar_and_is_the_whole_answer(choice: Any) -> None:
    ring = ScriptedRing(list(CALL))
    parameters = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}}
    function: Any = {"name": "weather", "parameters": {**parameters, "$defs": {"city": {}}}}
    other = {"type": "function", "function": {"name": "other", "strict": True}}
    tools: Any = [{"type": "function", "function": function}, other]
    async with openai_before(ring) as (client, _):
        fields = {**ASK, "tools": tools, "tool_choice": choice}
        message = (await client.chat.completions.create(**fields)).choices[0].message
        assert message.content is None and message.tool_calls is not None
        assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        calls: list[Any] = []
        async for part in await client.chat.completions.create(**fields, stream=True):
            calls += part.choices[0].delta.tool_calls or []
        assert names_of(calls) == [(0, "weather")]
        form = ring.submitted[0][1].structural_tag["format"]
        calls_form = (form["elements"][0] if choice == "required" else form)["content"]
        assert calls_form["at_least_one"]
        begins = [tag["begin"] for tag in calls_form["tags"]]
        names = ["weather", "other"] if choice == "required" else ["weather"]
        assert begins == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names]
        assert calls_form["tags"][0]["content"]["json_schema"] == {
            **function["parameters"],
            "x-guidance": {"lenient": True, "name": "tools[0] (weather)"},
        }


async def test_strict_tools_that_need_not_be_called_are_obeyed_where_they_are() -> None:
    ring, other = (
        ScriptedRing(CALLING),
        ScriptedRing(["x"], answer_format=to_info(AnswerFormat(calls=LLAMA3))),
    )
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    strict = {"name": "weather", "strict": True, "parameters": parameters}
    tools: Any = [
        {"type": "function", "function": strict},
        {"type": "function", "function": {"name": "lax", "parameters": {"type": "array"}}},
    ]
    async with openai_before(ring) as (client, _):
        answer = await client.chat.completions.create(**ASK, tools=tools)
        assert answer.choices[0].message.content == "Let me see."
        tag = ring.submitted[0][1].structural_tag["format"]
        first, second = tag["tags"]
        assert tag["triggers"] == ["<tool_call>"]
        assert first["begin"] == '<tool_call>\n{"name": "weather", "arguments": '
        assert first["content"]["json_schema"] == {
            **parameters,
            "x-guidance": {"lenient": False, "name": "tools[0] (weather)"},
        }
        assert first["end"] == "}\n</tool_call>"
        assert second["content"]["json_schema"] == {"type": "object"}
        with pytest.raises(openai.BadRequestError, match="both given"):
            await client.chat.completions.create(**ASK, tools=tools, extra_body={"regex": "a"})
    async with openai_before(other) as (client, _):
        await client.chat.completions.create(**ASK, tools=tools)
        other.facts["answer_format"] = {}
        await client.chat.completions.create(**ASK, tools=tools)
        llama, none = (submitted[1] for submitted in other.submitted)
        assert '{"name": "weather", "parameters": ' in json.dumps(llama.structural_tag).replace(
            "\\", ""
        )
        assert none.structural_tag is None


async def test_without_tools_the_same_answer_is_text() -> None:
    ring = ScriptedRing([CALL])
    async with openai_before(ring) as (client, _):
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            answer = await client.chat.completions.create(**ASK, **fields)
            assert answer.choices[0].message.content == CALL
            assert answer.choices[0].finish_reason == "stop"
        assert not ring.submitted[1][2]["chat"].tools


async def test_calls_and_answers_of_tools_go_back_as_the_template_wants_them() -> None:
    ring = ScriptedRing(["It rains."])
    call = {"id": "abc", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}  # fmt: skip
    messages: Any = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "content": "yes"},
    ]
    async with openai_before(ring) as (client, _):
        await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        sent = ring.submitted[0][0]
        assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
        assert sent[2] == {"role": "tool", "content": "yes", "tool_call_id": "abc"}


async def test_a_base_model_is_sent_to_completions() -> None:
    async with openai_before(ScriptedRing(["x"], chat=False)) as (client, _):
        with pytest.raises(openai.BadRequestError, match="/v1/completions"):
            await client.chat.completions.create(**ASK)


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (QueueFull("full"), 429, True),
        (QuotaExceeded("used up", 2.5), 429, True),
        (ServerStopping("stopping"), 503, True),
        (ServerFailed("worker_proc died"), 503, True),
        (DeadlineExceeded("too late"), 504, False),
        (RequestFailed("no"), 500, False),
    ],
)
async def test_an_error_of_the_ring_becomes_a_status(
    error: QuadrigaError, status: int, retry: bool
) -> None:
    ring = ScriptedRing(["a", "b"], error=error)
    async with openai_before(ring) as (client, gateway):
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError, match=str(error)) as caught:
                await client.completions.create(model="tiny", prompt="x", stream=stream)
            assert caught.value.status_code == status
            assert ("retry-after" in caught.value.response.headers) is retry
        assert gateway.metrics.errors["", error.code] == 2
        assert gateway.num_open == 0


async def test_openais_client_tries_again_when_the_queue_was_full() -> None:
    ring = ScriptedRing(["a"], error=QueueFull("full"))
    async with openai_before(ring) as (client, gateway):
        asking = asyncio.create_task(
            client.with_options(max_retries=1).completions.create(model="tiny", prompt="x")
        )
        while not gateway.metrics.errors["", "queue_full"]:
            await asyncio.sleep(0.01)
        ring.error = None
        assert (await asking).choices[0].text == "a"
        assert len(ring.submitted) == 2


async def test_an_error_in_the_middle_ends_the_stream_with_an_event() -> None:
    ring = ScriptedRing(["a"], leaves_open=True)
    async with openai_before(ring) as (client, gateway):
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        assert (await anext(stream)).choices[0].text == "a"
        ring.sinks[0](ServerFailed("worker_proc died"))
        with pytest.raises(openai.APIError, match="worker_proc died"):
            await anext(stream)
        while gateway.num_open:
            await asyncio.sleep(0)


async def test_a_stopping_gateway_answers_open_requests_and_refuses_new_ones() -> None:
    ring = ScriptedRing(["a", "b"], leaves_open=True)
    async with openai_before(ring) as (client, gateway):
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        draining = asyncio.create_task(gateway.drain(5.0))
        with pytest.raises(openai.InternalServerError, match="takes no new requests"):
            await client.completions.create(model="tiny", prompt="x")
        assert not draining.done()
        ring.sinks[0](chunk("c", ring.completion()))
        assert "".join([part.choices[0].text async for part in stream]) == "abc"
        await draining


async def test_when_the_ring_has_died_open_requests_end_with_its_reason() -> None:
    ring = ScriptedRing([])
    async with openai_before(ring) as (client, gateway):
        request = asyncio.create_task(client.completions.create(model="tiny", prompt="x"))
        while not ring.sinks:
            await asyncio.sleep(0)
        gateway.fail_all(ServerFailed("worker_proc died"))
        with pytest.raises(openai.InternalServerError, match="worker_proc died"):
            await request
        await gateway.drain(5.0)
