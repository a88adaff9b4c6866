"""Anthropic's API at a gateway in front of a scripted ring."""

import json
from typing import Any

import aiohttp
import pytest

from quadriga.errors import (
    DeadlineExceeded,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    ServerFailed,
)
from quadriga.server.answer_format import AnswerFormat, ReasoningFormat, to_info
from tests.unit.claude_code import TOOL_NAMES, claude_code_request
from tests.unit.http.anthropic_calls import COUNT, HELLO, MESSAGES, ask, events_of
from tests.unit.scripted_ring import HERMES, ScriptedRing, gateway_before

SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER: Any = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USE: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1", "content": "Sunny"}


def refused(message_part: str, **fields: Any) -> None:
    """Check that a request is answered with a 400 whose message has a text."""
    answer = ask(ScriptedRing(["x"]), **fields)
    assert answer.status == 400, answer.text
    assert answer.body["type"] == "error"
    assert answer.body["error"]["type"] == "invalid_request_error"
    assert message_part in answer.body["error"]["message"]


def test_an_answer_is_a_message_of_blocks() -> None:
    answer = ask(ScriptedRing(["Yes", "."]))
    body = answer.body
    assert body.pop("id") == f"msg_{answer.headers['Request-Id']}"
    assert body.pop("timings")["cached_tokens"] == 0
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Yes."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "output_tokens": 2,
            "cache_read_input_tokens": 0,
            "cache_creation_input_tokens": 0,
        },
    }


def test_a_call_is_a_tool_use_block_with_its_input() -> None:
    ring = ScriptedRing(["I look.\n", CALL])
    body = ask(ring, tools=[WEATHER]).body
    assert body["stop_reason"] == "tool_use"
    text, use = body["content"]
    assert text["text"].strip() == "I look."
    assert use.pop("id")
    assert use == {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}}
    function = {"name": "weather", "description": "The weather.",
                "parameters": WEATHER["input_schema"]}  # fmt: skip
    assert ring.submitted[0][2]["chat"].tools == [{"type": "function", "function": function}]


def test_a_stream_has_the_events_of_the_api_in_their_order() -> None:
    events = events_of(ask(ScriptedRing(["I look.\n", *CALL]), tools=[WEATHER], stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    assert message["usage"]["input_tokens"] == 3
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [start["content_block"]["type"] for start in starts] == ["text", "tool_use"]
    assert starts[1]["content_block"]["input"] == {}
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    arguments = "".join(piece.get("partial_json", "") for piece in pieces)
    assert json.loads(arguments) == {"city": "Rome"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 3
    assert events[-2]["timings"]["ttft_ms"] is not None
    assert events[-2]["usage"]["output_tokens"] == len(CALL) + 1


def test_a_stream_and_a_whole_answer_are_the_same_message() -> None:
    pieces = ["I look.\n", *CALL]
    whole = ask(ScriptedRing(pieces), tools=[WEATHER]).body["content"]
    events = events_of(ask(ScriptedRing(pieces), tools=[WEATHER], stream=True))
    streamed: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            streamed.append(event["content_block"] | {"text": "", "json": ""})
        elif event["type"] == "content_block_delta":
            streamed[-1]["text"] += event["delta"].get("text", "")
            streamed[-1]["json"] += event["delta"].get("partial_json", "")
    assert streamed[0]["text"] == whole[0]["text"]
    assert json.loads(streamed[1]["json"]) == whole[1]["input"]
    assert [block["type"] for block in streamed] == [block["type"] for block in whole]


@pytest.mark.parametrize(
    ("reason", "matched", "max_tokens", "expected"),
    [
        ("stop", None, 20, "end_turn"),
        ("stop", 2, 20, "end_turn"),
        ("stop", "END", 20, "stop_sequence"),
        ("length", None, 1, "max_tokens"),
        ("length", None, 20, "model_context_window_exceeded"),
        ("abort", None, 20, "max_tokens"),
    ],
)
def test_the_reason_of_the_end_is_one_of_the_api(
    reason: str, matched: Any, max_tokens: int, expected: str
) -> None:
    class EndingRing(ScriptedRing):
        def completion(self) -> Any:
            completion = super().completion()
            completion.finish_reason, completion.matched_stop = reason, matched
            return completion

    fields: dict[str, Any] = {"max_tokens": max_tokens, "stop_sequences": ["END"]}
    ring = EndingRing(["Yes"])
    body = ask(ring, **fields).body
    assert body["stop_reason"] == expected
    assert body["stop_sequence"] == (matched if isinstance(matched, str) else None)
    params, options = ring.submitted[0][1:]
    assert params.max_new_tokens == max_tokens and params.stop == ["END"]
    assert options["clamp_max_new_tokens"]
    assert events_of(ask(EndingRing(["Yes"]), stream=True, **fields))[-2]["delta"] == {
        "stop_reason": expected,
        "stop_sequence": body["stop_sequence"],
    }


def test_tokens_of_the_cache_are_no_input_tokens() -> None:
    class CachingRing(ScriptedRing):
        def completion(self) -> Any:
            completion = super().completion()
            completion.usage = type(completion.usage)(100, 1, 64)
            return completion

    usage = ask(CachingRing(["Yes"])).body["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (36, 64)
    usage = events_of(ask(CachingRing(["Yes"]), stream=True))[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (36, 64)


def test_no_tokens_compute_the_prompt_alone() -> None:
    body = ask(ScriptedRing(["Yes"]), max_tokens=0).body
    assert body["content"] == [] and body["stop_reason"] == "max_tokens"
    assert body["usage"]["output_tokens"] == 0


REASONING = {
    "answer_format": to_info(
        AnswerFormat(calls=HERMES, reasoning=ReasoningFormat(switch="enable_thinking"))
    )
}
THOUGHT = ["<thi", "nk>\nIs it", " Rome?\n</think>", "\n\nI look.\n", *CALL]


def test_thinking_text_and_calls_are_blocks_whole_and_streamed() -> None:
    ring = ScriptedRing(THOUGHT, **REASONING)
    body = ask(ring, tools=[WEATHER], thinking={"type": "adaptive"}).body
    thinking, text, use = body["content"]
    assert thinking["thinking"].strip() == "Is it Rome?" and thinking["signature"]
    assert text["text"].strip() == "I look."
    assert use["input"] == {"city": "Rome"}
    events = events_of(ask(ScriptedRing(THOUGHT, **REASONING), tools=[WEATHER], stream=True))
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thoughts = [piece["thinking"] for piece in pieces if piece["type"] == "thinking_delta"]
    assert "".join(thoughts) == thinking["thinking"]
    (signature,) = [piece for piece in pieces if piece["type"] == "signature_delta"]
    assert signature["signature"] == thinking["signature"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]


@pytest.mark.parametrize(
    ("thinking", "template_args", "budget", "kinds"),
    [
        (None, {}, None, ["thinking", "text"]),
        ({"type": "disabled"}, {"enable_thinking": False}, None, ["text"]),
        ({"type": "adaptive"}, {"enable_thinking": True}, None, ["thinking", "text"]),
        ({"type": "enabled", "budget_tokens": 7}, {"enable_thinking": True}, 7,
         ["thinking", "text"]),
    ],
)  # fmt: skip
def test_the_request_says_whether_and_how_long_the_model_reasons(
    thinking: Any, template_args: Any, budget: int | None, kinds: list[str]
) -> None:
    ring = ScriptedRing(["<think>Hm.</think>", "Yes"], **REASONING)
    body = ask(ring, thinking=thinking).body
    assert [block["type"] for block in body["content"]] == kinds
    assert body["content"][-1]["text"] == "Yes"
    params, options = ring.submitted[0][1:]
    assert options["chat"].template_args == template_args
    assert params.thinking_token_budget == budget


@pytest.mark.parametrize(("effort", "level"), [("low", "low"), ("xhigh", "high"), ("max", "high")])
def test_the_effort_is_a_variable_of_the_template(effort: str, level: str) -> None:
    ring = ScriptedRing(["Yes"], **REASONING)
    ask(ring, thinking={"type": "disabled"}, output_config={"effort": effort})
    arguments = ring.submitted[0][2]["chat"].template_args
    assert arguments == {"enable_thinking": False, "reasoning_effort": level}


def test_a_budget_is_no_error_for_a_model_that_does_not_reason() -> None:
    ring = ScriptedRing(["Yes"])
    assert ask(ring, thinking={"type": "enabled", "budget_tokens": 7}).status == 200
    assert ring.submitted[0][1].thinking_token_budget is None


def turns_of(messages: Any, **fields: Any) -> Any:
    """Return the ring's turns of a conversation."""
    ring = ScriptedRing(["x"])
    answer = ask(ring, messages=messages, **fields)
    assert answer.status == 200, answer.text
    return ring.submitted[0][0]


@pytest.mark.parametrize("length", [65, 128])
def test_names_of_tools_may_have_128_characters(length: int) -> None:
    name = "mcp__" + "n" * (length - 5)
    ring = ScriptedRing(["a"])
    choice = {"type": "tool", "name": name}
    ask(ring, tools=[{**WEATHER, "name": name}], tool_choice=choice)
    assert ring.submitted[0][2]["chat"].tools[0]["function"]["name"] == name
    refused = ask(ring, tools=[{**WEATHER, "name": name + "n" * (129 - length)}])
    assert refused.status == 400 and "1 to 128 letters" in refused.text


def test_results_of_tools_are_turns_of_tools_before_the_text() -> None:
    conversation = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
        {"role": "user", "content": [{"type": "text", "text": "Thanks."}, RESULT]},
    ]
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert turns_of(conversation, system="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain in Rome?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "Sunny", "name": "weather", "tool_call_id": "t1"},
        {"role": "user", "content": "Thanks."},
    ]


def test_messages_of_one_role_are_one_turn() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert turns_of(messages) == [{"role": "user", "content": "a\nb"}]
    other = USE | {"id": "t2"}
    split = [
        *HELLO,
        {"role": "assistant", "content": [USE]},
        {"role": "assistant", "content": [other]},
        {"role": "user", "content": [RESULT]},
        {"role": "user", "content": [RESULT | {"tool_use_id": "t2"}]},
    ]
    assert [turn["role"] for turn in turns_of(split)] == ["user", "assistant", "tool", "tool"]


def test_thinking_goes_back_to_the_template_and_a_failure_is_marked() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    redacted = {"type": "redacted_thinking", "data": "x"}
    failure = RESULT | {"is_error": True, "content": [{"type": "text", "text": "no network"}]}
    messages = [
        *HELLO,
        {"role": "assistant", "content": [thinking, redacted, USE]},
        {"role": "user", "content": [failure]},
    ]
    _, assistant, tool = turns_of(messages)
    assert assistant["reasoning_content"] == "Hm." and assistant["content"] == ""
    assert tool["content"] == "Error: no network"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    ring = ScriptedRing([" Paris"])
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    assert ask(ring, messages=messages).body["content"] == [{"type": "text", "text": " Paris"}]
    chat = ring.submitted[0][2]["chat"]
    assert chat.continue_final_message and not chat.add_generation_prompt
    assert not turns_of([*HELLO, {"role": "assistant", "content": ""}])[1:]
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    refused("messages.1: the assistant's last message is continued: give it text",
            messages=[*HELLO, {"role": "assistant", "content": [thinking]}])  # fmt: skip


def test_the_header_that_differs_in_each_request_is_left_out_of_the_system_prompt() -> None:
    first = turns_of(claude_code_request("tiny", "eb6c6")["messages"])
    bodies = [claude_code_request("tiny", nonce) | {"stream": False} for nonce in ("a1", "b2")]
    turns = [turns_of(**body) for body in bodies]
    assert turns[0] == turns[1]
    assert turns[0][0]["content"] == "You are a coding agent.\n\nUse the tools."
    assert turns[0][1:] == first


def test_a_request_of_claude_code_is_streamed() -> None:
    ring = ScriptedRing(["The files", " are README.md", " and setup.py."])
    answer = ask(ring, **claude_code_request("tiny"))
    assert answer.status == 200
    texts = [
        event["delta"]["text"] for event in events_of(answer) if "text" in event.get("delta", {})
    ]
    assert "".join(texts) == "The files are README.md and setup.py."
    tools = [tool["function"]["name"] for tool in ring.submitted[0][2]["chat"].tools]
    assert tools == list(TOOL_NAMES)


@pytest.mark.parametrize(
    ("message_part", "messages"),
    [
        ("messages.0.content.1: a block of type 'image'",
         [{"role": "user", "content": [{"type": "text", "text": "a"},
                                       {"type": "image", "source": {"type": "base64"}}]}]),
        ("messages.0.content.0: a block of type 'document'",
         [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}]),
        ("messages.0.content.0: a block of type 'tool_use'", [{"role": "user", "content": [USE]}]),
        ("messages.0.content.0.tool_use_id: 't1' answers no tool_use",
         [{"role": "user", "content": [RESULT]}]),
        ("messages.2.content.1.tool_use_id: 't1' answers no tool_use",
         [*HELLO, {"role": "assistant", "content": [USE]},
          {"role": "user", "content": [RESULT, RESULT]}]),
        ("messages.1: tool_use without tool_result: 't1'",
         [*HELLO, {"role": "assistant", "content": [USE]}, *HELLO]),
        ("messages.1: tool_use without tool_result: 't1'",
         [*HELLO, {"role": "assistant", "content": [USE]}]),
        ("messages.2.content.0.content.0: a block of type 'image'",
         [*HELLO, {"role": "assistant", "content": [USE]},
          {"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]),
        ("messages.1.content.1.id: 't1' is the id of another",
         [*HELLO, {"role": "assistant", "content": [USE, USE]}]),
        ("messages.1.content.0: a tool_use must have an id",
         [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "t1"}]}]),
        ("$.messages[0].role", [{"role": "robot", "content": "a"}]),
        ("$.messages", []),
    ],
)  # fmt: skip
def test_a_wrong_conversation_is_refused_with_its_place(message_part: str, messages: Any) -> None:
    refused(message_part, messages=messages)


@pytest.mark.parametrize(
    ("message_part", "fields"),
    [
        ("max_tokens is missing", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": -1}),
        ("temprature is not a field", {"temprature": 1}),
        ("thinking.budget_tokens is 20: it must be less than max_tokens",
         {"thinking": {"type": "enabled", "budget_tokens": 20}}),
        ("thinking.budget_tokens is missing", {"thinking": {"type": "enabled"}}),
        ("$.thinking.type", {"thinking": {"type": "deep"}}),
        ("tools.0: 'web_search_20250305' is a tool of Anthropic's servers",
         {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools.0.input_schema is missing", {"tools": [{"name": "f"}]}),
        ("tools.0.name is 'a b'", {"tools": [WEATHER | {"name": "a b"}]}),
        ("tools has 'weather' twice", {"tools": [WEATHER, WEATHER]}),
        ("tool_choice requires a call", {"tool_choice": {"type": "any"}}),
        ("tool_choice names 'other'",
         {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}),
        ("tool_choice.name is missing", {"tools": [WEATHER], "tool_choice": {"type": "tool"}}),
        ("mcp_servers: this server calls no MCP servers", {"mcp_servers": [{"url": "x"}]}),
        ("compaction: this server compacts no", {"compaction": {}}),
        ("container.skills", {"container": {"skills": [{"type": "custom"}]}}),
        ("output_config.format and output_format",
         {"output_config": {"format": {"type": "json_schema", "schema": {}}},
          "output_format": {"type": "json_schema", "schema": {}}}),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_name(message_part: str, fields: Any) -> None:
    refused(message_part, **fields)


def test_fields_without_an_effect_are_taken() -> None:
    answer = ask(
        ScriptedRing(["x"]),
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
        metadata={"user_id": "u"},
        service_tier="auto",
        container=None,
        mcp_servers=[],
        context_management={"edits": []},
        cache_control={"type": "ephemeral"},
        betas=["x"],
    )
    assert answer.status == 200


def test_the_output_format_and_the_sampling_fields_reach_the_ring() -> None:
    ring = ScriptedRing(["{}"])
    schema = {"type": "object"}
    output = {"format": {"type": "json_schema", "schema": schema}}
    ask(ring, output_config=output, temperature=0.5, top_k=3, top_p=0.9)
    params = ring.submitted[0][1]
    assert params.json_schema == schema
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 3, 0.9)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_can_be_forced(choice: Any) -> None:
    ring = ScriptedRing([CALL])
    body = ask(ring, tools=[WEATHER], tool_choice=choice).body
    assert ring.submitted[0][1].structural_tag or ring.submitted[0][1].ebnf
    assert body["stop_reason"] == "tool_use"
    assert body["content"][0]["input"] == {"city": "Rome"}


def test_one_call_at_a_time_and_no_calls() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    body = ask(ScriptedRing([CALL, CALL]), tools=[WEATHER], tool_choice=choice).body
    assert [block["type"] for block in body["content"]] == ["tool_use"]
    ring = ScriptedRing([CALL])
    body = ask(ring, tools=[WEATHER], tool_choice={"type": "none"}).body
    assert [block["type"] for block in body["content"]] == ["text"]
    assert ring.submitted[0][2]["chat"].tools == []


def test_tokens_are_counted_with_the_tools_and_the_system_prompt() -> None:
    ring = ScriptedRing([])
    answer = ask(ring, COUNT, system="Be brief.", tools=[WEATHER])
    assert answer.body == {"input_tokens": 3}
    prompt, _, options = ring.submitted[0]
    assert [turn["role"] for turn in prompt] == ["system", "user"]
    assert options["chat"].tools[0]["function"]["name"] == "weather"


def test_an_error_of_counting_has_the_format_of_the_api() -> None:
    ring = ScriptedRing([], error=InvalidRequest("prompt is refused by the template", "prompt"))
    answer = ask(ring, COUNT)
    assert answer.status == 400
    assert answer.body["error"] == {
        "type": "invalid_request_error",
        "message": "messages is refused by the template",
    }


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFull("the queue is full"), 429, "rate_limit_error"),
        (ServerFailed("a process has failed"), 503, "overloaded_error"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (RequestFailed("it failed"), 500, "api_error"),
    ],
)
def test_errors_of_the_ring_have_the_types_of_the_api(error: Any, status: int, kind: str) -> None:
    ring = ScriptedRing([], error=error)
    answer = ask(ring)
    assert (answer.status, answer.body["error"]["type"]) == (status, kind)
    assert answer.body["request_id"] == answer.headers["Request-Id"]
    assert ("Retry-After" in answer.headers) == (status in (429, 503))


def test_a_prompt_that_is_too_long_is_reported_in_the_words_that_claude_code_knows() -> None:
    ring = ScriptedRing([])
    ring.error = PromptTooLong(
        "prompt has 9000 tokens, max_new_tokens is 64, the model's context is 8192; shorten it",
        "prompt",
    )
    message = ask(ring).body["error"]["message"]
    assert message.startswith("prompt is too long: 9000 tokens > 8192 maximum; ")


async def test_an_error_in_a_stream_is_an_event() -> None:
    ring = ScriptedRing(["Yes"], leaves_open=True)
    answers = []
    async with gateway_before(ring) as (_, gateway):
        url = f"http://127.0.0.1:{gateway.args.port}{MESSAGES}"
        body = {"max_tokens": 20, "messages": HELLO, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            await response.content.readuntil(b"text_delta")
            ring.sinks[0](ServerFailed("the worker died"))
            answers.append(await response.text())
    name, data = answers[0].split("\n\n")[-2].split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


def test_threads_are_refused_with_the_code_by_which_the_sdk_sends_the_whole_conversation() -> None:
    answer = ask(ScriptedRing(["x"]), thread={"type": "create"})
    assert answer.status == 400
    assert answer.body["error"]["details"] == {"error_code": "thread_unsupported_request"}


def test_other_errors_of_the_path_have_the_format_of_the_api() -> None:
    assert ask(ScriptedRing([]), model="claude-x").body["error"] == {
        "type": "not_found_error",
        "message": "model 'claude-x' is not served here: use 'tiny'",
    }
    too_large = ask(ScriptedRing([]), system="x" * 5000, flags={"max_body_bytes": 1000})
    assert too_large.status == 413
    assert too_large.body["error"]["type"] == "request_too_large"


def test_a_key_is_taken_from_both_headers() -> None:
    flags = {"api_key": "secret"}
    for headers in (
        {"x-api-key": "secret"},
        {"Authorization": "Bearer secret"},
        {"Authorization": "bearer  secret"},
    ):
        assert ask(ScriptedRing(["x"]), headers=headers, flags=flags).status == 200
    for wrong in ({}, {"x-api-key": "other"}, {"x-api-key": ""}):
        answer = ask(ScriptedRing(["x"]), headers=wrong, flags=flags)
        assert answer.status == 401
        assert answer.body["error"]["type"] == "authentication_error"


def test_a_web_page_may_send_the_headers_of_the_api() -> None:
    flags = {"allowed_origins": "https://example.org"}
    headers = {"Origin": "https://example.org", "x-api-key": "k"}
    answer = ask(ScriptedRing(["x"]), headers=headers, flags=flags)
    assert answer.headers["Access-Control-Allow-Origin"] == "https://example.org"
    assert "Request-Id" in answer.headers["Access-Control-Expose-Headers"]
