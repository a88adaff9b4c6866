"""Items of the input become turns of a chat, and what does not fit is a 400 with its field."""

import asyncio
from typing import Any

import openai
import pytest

from http_proc.apis.responses.input import chat_turns, list_items, parse_items
from http_proc.apis.responses.store import ResponseStore
from http_proc.core.errors import ApiError
from tests.unit.http.responses.asking import ASK, PATCH, WEATHER, asking, both, refused, turns_of
from tests.unit.scripted_ring import ScriptedRing

USER: Any = {"role": "user", "content": "Rain?"}
CALLED: Any = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "sun"}
PATCHED: Any = {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "+a"}
DONE: Any = {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"}


def turns(items: list[Any], instructions: str | None = None) -> Any:
    listed = asyncio.run(list_items(items, ResponseStore()))
    return chat_turns(instructions, parse_items(listed))


def called(call_id: str, name: str, arguments: Any) -> Any:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text(kind: str, content: str) -> Any:
    return [{"type": kind, "text": content}]


def test_instructions_and_the_messages_of_the_system_at_the_head_are_one_turn() -> None:
    developer = {"type": "message", "role": "developer", "content": text("input_text", "B")}
    system = {"role": "system", "content": "C"}
    assert turns([developer, system, USER, system], "A") == [
        {"role": "system", "content": "A\n\nB\n\nC"},
        USER,
        system,
    ]
    assert turns([USER]) == [USER]


def test_items_of_one_answer_are_one_turn() -> None:
    reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
    reasoning["content"] = text("reasoning_text", "Hm.")
    message = {
        "type": "message",
        "role": "assistant",
        "content": text("output_text", "Let me see."),
    }
    items = [USER, reasoning, message, CALLED, PATCHED, OUTPUT, DONE, USER]
    assert turns(items) == [
        USER,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                called("c1", "weather", {}),
                called("c2", "apply_patch", {"input": "+a"}),
            ],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
        {"role": "tool", "content": "Done", "tool_call_id": "c2"},
        USER,
    ]


def test_two_answers_after_each_other_stay_two_turns() -> None:
    first = {"role": "assistant", "content": "No."}
    second = {"role": "assistant", "content": "Yes."}
    summary = {"type": "reasoning", "summary": text("summary_text", "Hm."), "id": "rs"}
    assert turns([USER, first, summary, second]) == [
        USER,
        first,
        {**second, "reasoning_content": "Hm."},
    ]


def test_calls_and_their_outputs_in_rounds_are_turns_in_rounds() -> None:
    again = [{**CALLED, "call_id": "c3"}, {**OUTPUT, "call_id": "c3"}]
    roles = [turn["role"] for turn in turns([USER, CALLED, OUTPUT, *again])]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


def test_outputs_may_be_lists_of_texts() -> None:
    output = {**OUTPUT, "output": text("input_text", "sun") + text("input_text", "ny")}
    assert turns([USER, CALLED, output])[-1]["content"] == "sunny"


@pytest.mark.parametrize(
    ("items", "param", "match"),
    [
        ([], "input", "no items"),
        ([USER, {"type": "web_search_call", "id": "ws"}], "input[1].type", "must be one of"),
        ([USER, {"content": "x"}], "input[1].type", "is None"),
        ([USER, {"type": 5}], "input[1].type", "is 5"),
        ([{"role": "robot", "content": "x"}], "input[0].role", "robot"),
        ([{"role": "user"}], "input[0].content", "missing"),
        ([{"role": "user", "content": 5}], "input[0].content", "Expected"),
        ([{**USER, "content": [{"type": "input_image"}]}], "input[0].content[0].type", "text"),
        ([USER, OUTPUT], "input[1].call_id", "no call before it"),
        ([USER, OUTPUT, CALLED], "input[1].call_id", "no call before it"),
        ([USER, CALLED], "input", "no item has its output"),
        ([USER, CALLED, CALLED, OUTPUT], "input[2].call_id", r"input\[1\] has too"),
        ([USER, CALLED, OUTPUT, OUTPUT], "input[3].call_id", r"input\[2\] has too"),
        ([USER, CALLED, {**DONE, "call_id": "c1"}], "input[2].call_id", "other kind"),
        ([USER, {**CALLED, "arguments": "{"}, OUTPUT], "input[1].arguments", "not JSON"),
        ([{**USER, "id": "a"}, {**USER, "id": "a"}], "input[1].id", "send each item once"),
        ([USER, {"type": "item_reference", "id": "msg_1"}], "input[1]", "stores no items"),
        ([USER, {"id": "msg_1"}], "input[1]", "stores no items"),
        (
            [USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}],
            "input[1].encrypted_content",
            "neither writes nor reads",
        ),
    ],
)
def test_a_wrong_item_is_refused_by_its_place(items: list[Any], param: str, match: str) -> None:
    with pytest.raises(ApiError, match=match) as raised:
        turns(items)
    assert raised.value.status == 400 and raised.value.answer.error.param == param


async def test_wrong_requests_are_refused_by_the_field() -> None:
    ring = ScriptedRing(["No"])
    grammar = {**PATCH, "format": {"type": "grammar"}}
    searched: Any = {"type": "web_search"}
    async with asking(ring) as client:
        await refused(client, "previous_response_id", "stores no", previous_response_id="resp_1")
        await refused(client, "conversation", "stores no", conversation="conv_1")
        await refused(client, "background", "stream: true", background=True)
        await refused(client, "prompt", "stores none", prompt={"id": "pmpt_1"})
        await refused(client, "tools[1].type", "'web_search'", tools=[WEATHER, searched])
        await refused(client, "tools[0].name", "missing", tools=[{"type": "function"}])
        await refused(client, "tools[0].format", "needs 'syntax'", tools=[grammar])
        await refused(client, "tools", "twice", tools=[WEATHER, WEATHER])
        await refused(client, "tool_choice", "must be", tool_choice="some", tools=[WEATHER])
        await refused(client, "tool_choice", "requires a call", tool_choice="required")
        wrong: Any = {"type": "function", "name": "wether"}
        await refused(client, "tool_choice", "no tool", tool_choice=wrong, tools=[WEATHER])
        listed: Any = {"type": "function", "name": ["weather"]}
        await refused(client, "tool_choice", "no tool", tool_choice=listed, tools=[WEATHER])
        custom: Any = {"type": "custom", "name": "weather"}
        await refused(client, "tool_choice", "no tool", tool_choice=custom, tools=[WEATHER])
        some: Any = {"type": "allowed_tools", "mode": "auto", "tools": [wrong]}
        await refused(client, "tool_choice.tools[0]", "no tool", tool_choice=some, tools=[WEATHER])
        await refused(client, "text.format", "schema", text={"format": {"type": "json_schema"}})
        await refused(client, "include", "Invalid enum", include=["everything"])
        await refused(client, "reasoning", "effort", reasoning={"effort": "huge"})
        await refused(client, "extra", "not a field", extra_body={"extra": 1})
        await refused(client, "n", "not a field", extra_body={"n": 2})
        await refused(client, "max_output_tokens", "at least", max_output_tokens=0)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="x")
        with pytest.raises(openai.BadRequestError, match="input is missing"):
            await client.responses.create(model="tiny")
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")


async def test_a_model_that_cannot_chat_is_refused() -> None:
    async with asking(ScriptedRing(["No"], chat=False)) as client:
        await refused(client, "input", "base model")


async def test_fields_without_an_effect_are_taken_and_shown() -> None:
    ring = ScriptedRing(["No"])
    async with asking(ring) as client:
        answer = await both(
            client,
            **ASK,
            store=True,
            truncation="auto",
            user="u",
            safety_identifier="s",
            prompt_cache_key="k",
            service_tier="flex",
            max_tool_calls=3,
            temperature=0.5,
            top_p=0.9,
            text={"format": {"type": "text"}, "verbosity": "low"},
        )
        assert answer.to_dict()["store"] is False
        assert (answer.user, answer.safety_identifier, answer.prompt_cache_key) == ("u", "s", "k")
        assert answer.service_tier == "default" and answer.max_tool_calls == 3
        assert (answer.temperature, answer.top_p) == (0.5, 0.9)
        assert answer.truncation == "auto" and answer.text is not None
        assert answer.text.verbosity == "low"
        _, params, options = ring.submitted[0]
        assert params.temperature == 0.5 and options["truncate_prompt"] is True


async def test_an_agent_calls_a_tool_and_uses_its_output() -> None:
    """Send the output items of each answer back, as agents do."""
    ring = ScriptedRing(
        ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>']
    )
    async with asking(ring) as client:
        items: list[Any] = [USER]
        answer = await client.responses.create(model="tiny", input=items, tools=[WEATHER])
        items += [item.to_dict() for item in answer.output]
        (call,) = answer.output
        assert call.type == "function_call"
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sun"})
        ring.pieces = ["Sunny."]
        answer = await client.responses.create(model="tiny", input=items, tools=[WEATHER])
        assert answer.output_text == "Sunny."
        assert turns_of(ring)[1:] == [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [called(call.call_id, "weather", {"city": "Rome"})],
            },
            {"role": "tool", "content": "sun", "tool_call_id": call.call_id},
        ]
