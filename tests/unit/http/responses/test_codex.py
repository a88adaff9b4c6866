"""Requests in the shape of Codex CLI's are taken, and its stream has what that client reads."""

import json
import logging
import re
from typing import Any

import aiohttp
import openai
import pytest

from tests.unit.http.responses.asking import THINKING, asking, turns_of
from tests.unit.scripted_ring import ScriptedRing

GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " /(.+)/ LF ("+" /(.*)/ LF)+
%import common.LF
"""
SHELL: Any = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}
PLAN: Any = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the task plan.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "explanation": {"type": "string"},
            "plan": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                    "required": ["step", "status"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["plan"],
        "additionalProperties": False,
    },
}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}


def message(role: str, text: str) -> Any:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


REQUEST: Any = {
    "model": "tiny",
    "instructions": "You are a coding agent. " * 1000,
    "input": [
        message("developer", "<permissions instructions>…</permissions instructions>"),
        message("user", "# AGENTS.md instructions"),
        message("user", "<environment_context><cwd>/repo</cwd></environment_context>"),
        message("user", "Write a file."),
    ],
    "tools": [SHELL, PLAN, PATCH],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "low"},
    "service_tier": "priority",
    "client_metadata": {"x-codex-installation-id": "1"},
}


TICKETS: Any = {
    "type": "namespace",
    "name": "mcp__tracker",
    "description": "Tools in the mcp__tracker namespace.",
    "tools": [
        {
            "type": "function",
            "name": "list_tickets",
            "description": "List the open tickets.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"status": {"type": "string"}}},
        },
        {"type": "custom", "name": "query", "description": "A query."},
    ],
}
SEARCH: Any = {
    "type": "tool_search",
    "execution": "client",
    "description": "Find tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
FOUND: Any = {**SHELL, "name": "found", "defer_loading": True}


async def events_of(client: openai.AsyncOpenAI, body: Any) -> list[Any]:
    """Return the events of a stream as their JSON bodies, each after a check of its name."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{client.base_url}responses", json=body) as answer,
    ):
        text = await answer.text()
        assert answer.status == 200, text
        assert answer.headers["Content-Type"].startswith("text/event-stream")
    events = []
    for part in text.strip().split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_session_of_codex_runs_to_its_end() -> None:
    patch = "*** Begin Patch\n*** Add File: a.py\n+print('ü')\n*** End Patch"
    shell_call = {"name": "shell", "arguments": {"command": ["ls", "-l"]}}
    patch_call = {"name": "apply_patch", "arguments": {"input": patch}}
    steps = [
        f"<think>Look first.</think>\n\n<tool_call>\n{json.dumps(shell_call)}\n</tool_call>",
        f"<think></think>Now write.\n<tool_call>\n{json.dumps(patch_call)}\n</tool_call>",
        "<think>Done.</think>Written.",
    ]
    ring = ScriptedRing([], answer_format=THINKING)
    async with asking(ring) as client:
        items = list(REQUEST["input"])
        kinds: list[list[str]] = []
        for step in steps:
            ring.pieces = list(step)
            events = await events_of(client, {**REQUEST, "input": items})
            assert events[-1]["type"] == "response.completed"
            assert events[-1]["response"]["usage"]["total_tokens"] > 0
            done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
            kinds.append([item["type"] for item in done])
            items += [sent_back(item) for item in done]
            items += [output_of(item) for item in done if "call_id" in item]
        assert kinds == [
            ["reasoning", "function_call"],
            ["message", "custom_tool_call"],
            ["reasoning", "message"],
        ]
        turns = turns_of(ring)
        assert [turn["role"] for turn in turns] == [
            "system", "user", "user", "user", "assistant", "tool", "assistant", "tool",
        ]  # fmt: skip
        assert turns[0]["content"].startswith("You are a coding agent. ")
        assert turns[0]["content"].endswith("</permissions instructions>")
        assert turns[4]["reasoning_content"] == "Look first."
        assert turns[4]["tool_calls"][0]["function"] == shell_call
        assert turns[6]["tool_calls"][0]["function"] == patch_call
        assert turns[7]["content"] == "Done!"
        tools = ring.submitted[-1][2]["chat"].tools
        names = [tool["function"]["name"] for tool in tools]
        assert names == ["shell", "update_plan", "apply_patch"]
        assert GRAMMAR in tools[2]["function"]["description"]


def sent_back(item: Any) -> Any:
    """Return an item as this client sends it back: without its id, and without nulls."""
    return {name: value for name, value in item.items() if name != "id" and value is not None}


def output_of(item: Any) -> Any:
    """Return the output of a call."""
    kind = f"{item['type']}_output"
    return {"type": kind, "call_id": item["call_id"], "output": "Done!"}


def call_of(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (
            "mcp__tracker__list_tickets",
            {"status": "open"},
            {
                "type": "function_call",
                "name": "list_tickets",
                "namespace": "mcp__tracker",
                "arguments": '{"status": "open"}',
            },
        ),
        (
            "mcp__tracker__query",
            {"input": "all"},
            {
                "type": "custom_tool_call",
                "name": "query",
                "namespace": "mcp__tracker",
                "input": "all",
            },
        ),
        (
            "shell",
            {"command": []},
            {"type": "function_call", "name": "shell", "arguments": '{"command": []}'},
        ),
    ],
)
async def test_tools_of_a_namespace_are_offered_and_calls_name_both(
    function: str, arguments: Any, expected: Any
) -> None:
    ring = ScriptedRing([call_of(function, arguments)], answer_format=THINKING)
    async with asking(ring) as client:
        body = {**REQUEST, "tools": [SHELL, TICKETS, SEARCH], "parallel_tool_calls": True}
        events = await events_of(client, body)
        tools = ring.submitted[-1][2]["chat"].tools
        assert [tool["function"]["name"] for tool in tools] == [
            "shell", "mcp__tracker__list_tickets", "mcp__tracker__query",
        ]  # fmt: skip
        description = "mcp__tracker: Tools in the mcp__tracker namespace.\n\nList the open tickets."
        assert tools[1]["function"]["description"] == description
        items = [e["item"] for e in events if e["type"].startswith("response.output_item.")]
        assert [item.get("namespace") for item in items] == [expected.get("namespace")] * 2
        done = {name: items[-1].get(name) for name in expected}
        assert done == expected and "namespace" not in items[-1].keys() - expected.keys()
        assert events[-1]["response"]["tools"][1:] == [TICKETS, SEARCH]
        back = [sent_back(items[-1]), output_of(items[-1])]
        await events_of(client, {**body, "input": [*REQUEST["input"], *back]})
        (call,) = turns_of(ring)[-2]["tool_calls"]
        assert call["function"] == {"name": function, "arguments": arguments}


async def test_tools_that_the_client_found_are_offered_and_its_searches_are_no_turns() -> None:
    ring = ScriptedRing([call_of("found", {"command": ["x"]})], answer_format=THINKING)
    added = {"type": "additional_tools", "role": "developer", "tools": [FOUND, TICKETS]}
    search: Any = {"type": "tool_search_call", "call_id": "s1", "arguments": {"query": "x"}}
    search |= {"execution": "client", "status": "completed"}
    output: Any = {**search, "type": "tool_search_output", "tools": [FOUND, SHELL]}
    items = [added, *REQUEST["input"], search, output]
    async with asking(ring) as client:
        body = {**REQUEST, "tools": [SHELL, SEARCH], "input": items}
        events = await events_of(client, body)
        tools = ring.submitted[-1][2]["chat"].tools
        names = ["shell", "found", "mcp__tracker__list_tickets", "mcp__tracker__query"]
        assert [tool["function"]["name"] for tool in tools] == names
        assert [turn["role"] for turn in turns_of(ring)] == ["system", "user", "user", "user"]
        assert events[-1]["response"]["output"][0]["name"] == "found"
        assert events[-1]["response"]["tools"] == [SHELL, SEARCH]


async def test_a_tool_of_a_namespace_can_be_forced_and_a_wrong_one_is_named() -> None:
    ring = ScriptedRing(['{"status": "open"}'], answer_format=THINKING)
    async with asking(ring) as client:
        choice: Any = {"type": "function", "name": "list_tickets", "namespace": "mcp__tracker"}
        body: Any = {"model": "tiny", "input": "x", "tools": [SHELL, TICKETS]}
        await client.responses.create(**body, tool_choice=choice)
        for wrong, text in (
            ({"tool_choice": {**choice, "namespace": "other"}}, "no tool of type 'function'"),
            ({"tools": [{**TICKETS, "tools": [SEARCH]}]}, "tools[0].tools[0].type must be"),
            ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools is missing"),
            ({"tools": [TICKETS, TICKETS]}, "twice"),
            ({"tools": [{"type": "web_search_2025_08_26"}]}, "runs no tools of its own"),
        ):
            with pytest.raises(openai.BadRequestError, match=re.escape(text)):
                await client.responses.create(**{**body, **wrong})


async def test_tools_that_the_client_runs_itself_are_passed_over_with_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ring = ScriptedRing(["Hi"], answer_format=THINKING)
    kinds = ["local_shell", "apply_patch", f"of_the_future_{id(ring)}"]

    caplog.set_level(logging.INFO)
    async with asking(ring) as client:
        tools: Any = [{"type": kind} for kind in kinds] * 2
        answer = await client.responses.create(model="tiny", input="x", tools=tools)
        assert answer.output_text == "Hi"
    assert sum(kinds[2] in record.getMessage() for record in caplog.records) == 1


async def test_a_call_in_a_fence_is_a_call_unless_a_strict_tool_or_a_schema_makes_the_answer() -> (
    None
):
    fenced = '```json\n{"name": "shell", "arguments": {"command": ["ls"]}}\n```'
    body: Any = {"model": "tiny", "input": "List.", "tools": [SHELL]}
    ring = ScriptedRing([fenced[:9], fenced[9:30], fenced[30:]])
    async with asking(ring) as client:
        for streamed in (False, True):
            answer: Any = await client.responses.create(**body, stream=streamed)
            if streamed:
                answer = [event async for event in answer][-1].response
            (call,) = answer.output
            assert (call.type, call.name, call.status) == ("function_call", "shell", "completed")
            assert json.loads(call.arguments) == {"command": ["ls"]}
        strict = {**body, "tools": [{**SHELL, "strict": True}]}
        format_ = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
        for other in (strict, {**body, "text": {"format": format_}}, {**body, "tools": []}):
            answer = await client.responses.create(**other)
            assert answer.output_text == fenced
