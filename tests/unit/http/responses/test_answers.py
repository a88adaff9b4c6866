"""Answers of /v1/responses: the response object and its stream are the same."""

import json
from typing import Any

import aiohttp
import openai
import pydantic
import pytest
from openai.types.responses import (
    Response,
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from http_proc.apis.responses.answer import ResponseAnswer, ResponseStream
from http_proc.apis.responses.output import ResponseOutput
from http_proc.apis.responses.schema import ResponseObject
from http_proc.core.errors import ApiError
from quadriga.client.types import LikelyToken, TokenLogprob
from quadriga.errors import QueueFull, RequestFailed
from tests.unit.http.responses.asking import (
    ASK,
    CALL,
    PATCH,
    THINKING,
    WEATHER,
    asking,
    both,
    stream,
    turns_of,
)
from tests.unit.scripted_ring import ScriptedRing, chunk

REASONED = ["<think>", "\n", "It ", "may.", "\n", "</think>", "\n\n", "No", " rain.", ""]


async def test_a_text_is_a_message() -> None:
    ring = ScriptedRing(["No", " rain."])
    async with asking(ring) as client:
        answer = await both(client, **ASK, instructions="Be brief.", metadata={"a": "b"})
        assert answer.output_text == "No rain."
        (message,) = answer.output
        assert isinstance(message, ResponseOutputMessage) and message.status == "completed"
        assert answer.id.startswith("resp_") and message.id.startswith("msg_")
        assert answer.status == "completed" and answer.completed_at is not None
        assert answer.instructions == "Be brief." and answer.metadata == {"a": "b"}
        assert answer.usage is not None
        assert answer.usage.total_tokens == 5 and answer.usage.input_tokens_details is not None
        assert turns_of(ring) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain?"},
        ]


async def test_the_response_has_every_field_that_the_clients_types_require() -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring) as client:
        tools = [WEATHER, PATCH]
        answer = await client.responses.with_raw_response.create(**ASK, tools=tools)
        body = answer.http_response.json()
        assert Response.model_validate(body).tools[0].type == "function"
        assert body["store"] is False and body["object"] == "response"


async def test_an_answer_at_the_limit_is_incomplete() -> None:
    ring = ScriptedRing(["No", " rain"])
    ring.finish_reason = "length"
    async with asking(ring) as client:
        answer = await both(client, **ASK, max_output_tokens=2)
        assert answer.status == "incomplete" and answer.completed_at is None
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        (message,) = answer.output
        assert isinstance(message, ResponseOutputMessage) and message.status == "incomplete"
        assert ring.submitted[0][1].max_new_tokens == 2 and answer.max_output_tokens == 2


async def test_a_whole_answer_is_read_in_chunks_only_where_their_tokens_are_counted() -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring) as client:
        await client.responses.create(**ASK)
        await client.responses.create(**ASK, top_logprobs=1)
        ring.facts["answer_format"] = THINKING
        await client.responses.create(**ASK)
        streamed = [options["stream"] for _, _, options in ring.submitted]
        assert streamed == [False, True, True]


async def test_an_aborted_answer_is_cancelled() -> None:
    ring = ScriptedRing(["No", " rain"])
    ring.finish_reason = "abort"
    async with asking(ring) as client:
        assert (await both(client, **ASK)).status == "cancelled"


async def test_an_empty_answer_is_an_empty_message() -> None:
    async with asking(ScriptedRing([""])) as client:
        answer = await both(client, **ASK)
        assert answer.output_text == "" and len(answer.output) == 1


async def test_calls_are_items_in_the_order_of_the_answer() -> None:
    ring = ScriptedRing(["Let me ", "see. ", *CALL, "\n", *CALL])
    async with asking(ring) as client:
        answer = await both(client, **ASK, tools=[WEATHER])
        message, first, second = answer.output
        assert isinstance(message, ResponseOutputMessage)
        assert isinstance(first, ResponseFunctionToolCall)
        assert isinstance(second, ResponseFunctionToolCall)
        assert first.name == "weather" and first.arguments == '{"city": "Rome"}'
        assert first.status == "completed" and first.call_id != second.call_id
        assert answer.status == "completed"
        function = ring.submitted[0][2]["chat"].tools[0]["function"]
        assert function["name"] == "weather" and function["parameters"] == WEATHER["parameters"]
        one = await client.responses.create(**ASK, tools=[WEATHER], parallel_tool_calls=False)
        assert len([item for item in one.output if item.type == "function_call"]) == 1


async def test_calls_of_custom_tools_have_a_text() -> None:
    text = '*** Begin\n+print("ü😀\\n")\n*** End'
    escaped = '*** Begin\\n+print(\\"\\u00fc\\ud83d\\ude00\\\\n\\")\\n*** End'
    arguments = f'{{"input": "{escaped}"}}'
    call = f'<tool_call>\n{{"name": "apply_patch", "arguments": {arguments}}}\n</tool_call>'
    ring = ScriptedRing(list(call))
    async with asking(ring) as client:
        answer = await both(client, **ASK, tools=[WEATHER, PATCH])
        (item,) = answer.output
        assert isinstance(item, ResponseCustomToolCall)
        assert item.name == "apply_patch" and item.input == text


async def test_a_forced_call_is_a_grammar_and_the_text_format_is_left_out() -> None:
    ring = ScriptedRing([CALL])
    text: Any = {"format": {"type": "json_object"}}
    async with asking(ring) as client:
        choices: list[Any] = ["required", {"type": "function", "name": "weather"}]
        choices.append({"type": "allowed_tools", "mode": "required", "tools": [
            {"type": "function", "name": "weather"}]})  # fmt: skip
        for choice in choices:
            answer = await client.responses.create(
                **ASK, tools=[WEATHER, PATCH], tool_choice=choice, text=text
            )
            (call,) = answer.output
            assert isinstance(call, ResponseFunctionToolCall)
            assert call.arguments == '{"city": "Rome"}'
        tags = [str(submitted[1].structural_tag) for submitted in ring.submitted]
        assert ["weather" in tag for tag in tags] == [True, True, True]
        assert ["apply_patch" in tag for tag in tags] == [True, False, False]
        assert len(answer.tools) == 2


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


async def test_parse_returns_the_object_that_was_asked_for() -> None:
    ring = ScriptedRing(['{"city": ', '"Rome"}'])
    async with asking(ring) as client:
        answer = await client.responses.parse(**ASK, text_format=Weather)
        assert answer.output_parsed == Weather(city="Rome")
        assert ring.submitted[0][1].json_schema["properties"]["city"]["type"] == "string"
        final, events = await stream(client, **ASK, text_format=Weather)
        assert final.output_parsed == Weather(city="Rome")  # type: ignore[attr-defined]
        kinds = [event.type for event in events]
        assert kinds.count("response.output_text.delta") == 2


async def test_tools_made_of_pydantic_models_are_parsed() -> None:
    ring = ScriptedRing([CALL])
    tool: Any = openai.pydantic_function_tool(Weather, name="weather")
    flat: Any = {"type": "function", **tool["function"]}
    async with asking(ring) as client:
        answer = await client.responses.parse(**ASK, tools=[flat])
        (call,) = answer.output
        assert call.type == "function_call"
        assert ring.submitted[0][1].structural_tag is not None
        final, _ = await stream(client, **ASK, tools=[flat])
        assert final.output[0].type == "function_call"


async def test_an_answer_with_tools_and_a_format_is_calls_or_the_format() -> None:
    ring = ScriptedRing([CALL])
    async with asking(ring) as client:
        answer = await client.responses.parse(**ASK, tools=[WEATHER], text_format=Weather)
        assert [item.type for item in answer.output] == ["function_call"]
        schema, calls = ring.submitted[0][1].structural_tag["format"]["elements"]
        assert schema["json_schema"]["properties"]["city"]["type"] == "string"
        assert ring.submitted[0][1].json_schema is None
        assert '"weather", "arguments": ' in str(calls)
        ring.pieces = ['{"city": "Rome"}']
        answer = await client.responses.parse(**ASK, tools=[WEATHER], text_format=Weather)
        assert answer.output_parsed == Weather(city="Rome")


async def test_logprobs_are_those_of_the_text() -> None:
    ring = ScriptedRing(["N", "o", *CALL])
    ring.logprobs = lambda text: [
        TokenLogprob(1, -0.5, text.encode(), [LikelyToken(1, -0.5, text.encode())])
    ]
    async with asking(ring) as client:
        answer = await both(
            client, **ASK, tools=[WEATHER], include=["message.output_text.logprobs"], top_logprobs=1
        )
        (message, _) = answer.output
        assert isinstance(message, ResponseOutputMessage)
        (part,) = message.content
        assert part.type == "output_text" and part.logprobs is not None
        assert [token.token for token in part.logprobs] == ["N", "o"]
        assert part.logprobs[0].top_logprobs[0].logprob == -0.5


async def test_reasoning_is_an_item_and_its_tokens_are_counted() -> None:
    ring = ScriptedRing(REASONED, answer_format=THINKING)
    async with asking(ring) as client:
        answer = await both(client, **ASK, reasoning={"effort": "low", "summary": "auto"})
        reasoning, message = answer.output
        assert isinstance(reasoning, ResponseReasoningItem) and not reasoning.summary
        assert reasoning.content is not None and reasoning.id.startswith("rs_")
        assert reasoning.content[0].text == "It may."
        assert isinstance(message, ResponseOutputMessage)
        assert answer.output_text == "No rain."
        assert answer.usage is not None and answer.usage.output_tokens == 10
        # The marks and the line breaks beside them count as reasoning, the text does not.
        assert answer.usage.output_tokens_details.reasoning_tokens == 7
        assert ring.submitted[0][2]["chat"].template_args == {"reasoning_effort": "low"}
        assert answer.reasoning is not None and answer.reasoning.effort == "low"
        final, _ = await stream(client, **ASK)
        assert final.output_text == "No rain."


@pytest.mark.parametrize("prompt_end", ["", "<think>\n"])
async def test_reasoning_that_is_cut_off_is_an_incomplete_item(prompt_end: str) -> None:
    ring = ScriptedRing(["" if prompt_end else "<think>", "It ", "may"], answer_format=THINKING)
    ring.finish_reason, ring.prompt_end = "length", prompt_end
    async with asking(ring) as client:
        answer = await both(client, **ASK)
        (item,) = answer.output
        assert isinstance(item, ResponseReasoningItem) and item.status == "incomplete"
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 3


async def test_a_call_in_the_reasoning_is_no_call_and_a_call_after_it_is_one() -> None:
    ring = ScriptedRing(["<think>", *CALL, "</think>", *CALL], answer_format=THINKING)
    async with asking(ring) as client:
        answer = await both(client, **ASK, tools=[WEATHER])
        assert [item.type for item in answer.output] == ["reasoning", "function_call"]


async def test_a_call_that_is_cut_off_is_an_incomplete_item() -> None:
    ring = ScriptedRing([*CALL[:-20]])
    ring.finish_reason = "length"
    async with asking(ring) as client:
        answer = await both(client, **ASK, tools=[WEATHER])
        (call,) = answer.output
        assert isinstance(call, ResponseFunctionToolCall) and call.status == "incomplete"
        assert answer.status == "incomplete"


async def test_an_error_before_the_answer_is_a_status() -> None:
    ring = ScriptedRing([], error=QueueFull("the queue is full"))
    async with asking(ring) as client:
        for streamed in (False, True):
            with pytest.raises(openai.RateLimitError):
                await client.responses.create(**ASK, stream=streamed)


async def test_an_error_within_a_stream_ends_it_with_a_failed_response() -> None:
    ring = ScriptedRing(["No", " ra"], leaves_open=True)
    async with asking(ring) as client:
        events: list[Any] = []
        async for event in await client.responses.create(**ASK, stream=True):
            events.append(event)
            if event.type == "response.output_text.delta" and event.delta == " ra":
                ring.sinks[0](RequestFailed("the worker is gone"))
        error, failed = events[-2:]
        assert error.type == "error" and "worker" in error.message
        assert failed.type == "response.failed" and failed.response.status == "failed"
        assert failed.response.error.code == "server_error"
        assert failed.response.output[0].content[0].text == "No ra"
        assert failed.response.output[0].status == "incomplete"
        assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_error_before_all_events_follows_those_of_the_begin() -> None:
    response = ResponseObject(id="resp_1", created_at=1, model="tiny")
    stream = ResponseStream(ResponseAnswer(response, ResponseOutput("resp_1", {})))
    data = stream.error(ApiError(429, "the queue is full", code="queue_full")).decode()
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: ")]
    assert [(event["type"], event["sequence_number"]) for event in events] == [
        ("response.created", 0),
        ("response.in_progress", 1),
        ("error", 2),
        ("response.failed", 3),
    ]
    assert events[3]["response"]["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("rid", ["resp_a-1", "a-1"])
async def test_a_response_is_aborted_by_its_id_or_that_of_its_request(rid: str) -> None:
    class AbortableRing(ScriptedRing):
        async def abort(self, request_id: str) -> None:
            self.sinks[0](chunk("", self.completion()))

    ring = AbortableRing(["No"])
    ring.leaves_open, ring.finish_reason = True, "abort"
    async with asking(ring) as client:
        events: list[Any] = []
        headers = {"X-Request-Id": "a-1"}
        async for event in await client.responses.create(**ASK, stream=True, extra_headers=headers):
            events.append(event)
            if event.type == "response.output_text.delta":
                url = f"{client.base_url}".removesuffix("v1/")
                async with aiohttp.ClientSession() as session:
                    await session.post(f"{url}abort_request", json={"rid": rid})
        assert events[0].response.id == "resp_a-1"
        assert events[-1].type == "response.incomplete"
        assert events[-1].response.status == "cancelled"


async def test_events_have_their_names_in_the_stream() -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring) as client:
        answer = await client.responses.with_raw_response.create(**ASK, stream=True)
        lines = (await answer.http_response.aread()).decode().splitlines()
        kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
