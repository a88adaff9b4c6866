"""Hints for the prefix cache in Anthropic's and OpenAI's fields, and what usage says of them."""

import json
from typing import Any

import pytest

from quadriga.wire.cache import CacheHint
from tests.unit.http.calls import answer_of, send
from tests.unit.scripted_ring import ScriptedRing, gateway_before

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
HI = [{"role": "user", "content": "Hi"}]
ASK: dict[str, Any] = {"messages": HI, "max_tokens": 8}


def hint_of(path: str, **body: Any) -> CacheHint | None:
    ring = ScriptedRing(["5"])
    answer = answer_of(ring, path, body)
    assert answer.status == 200, answer.body
    hint = ring.submitted[0][2].get("cache")
    assert hint is None or isinstance(hint, CacheHint)
    return hint


def test_anthropics_marks_are_found_wherever_they_are() -> None:
    text = {"type": "text", "text": "Hi"}
    tool = {"name": "t", "input_schema": {"type": "object"}}
    call = {"type": "tool_use", "id": "1", "name": "t", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{**text, **HOUR}]}
    turns = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    marked_and_not = [{**text, **MARK}, text]
    asked = {"role": "user", "content": marked_and_not}
    answered = {"role": "assistant", "content": [{**text, **MARK}, call]}
    for fields, seconds, place in (
        ({}, None, ()),
        (MARK, 300, ()),
        (HOUR, 3600, ()),
        ({"system": [{**text, **MARK}]}, 300, (2, 0)),  # with the tools, before the messages
        ({"tools": [{**tool, **HOUR}]}, 3600, (1, 0)),
        ({"messages": [{"role": "user", "content": [{**text, **MARK}]}]}, 300, (1, 2)),
        ({"messages": [asked]}, 300, (1, 2)),
        ({"messages": [asked, *turns[1:]], "tools": [tool]}, 3600, (3, None)),
        ({"messages": [*HI, answered, turns[2]], "system": "Be brief."}, 3600, (4, None)),
        ({"messages": turns, "tools": [tool]}, 3600, (3, None)),
        ({"system": [{**text, **HOUR}], **MARK}, 3600, ()),  # the longest, and the last
        ({"system": [{**text, **HOUR}], "messages": [asked]}, 3600, (2, 2)),
    ):
        hint = hint_of("/v1/messages", **(ASK | fields))
        assert hint == (None if seconds is None else CacheHint("", seconds, 0, *place)), fields


def test_an_unknown_time_is_refused_by_name() -> None:
    mark = {"type": "ephemeral", "ttl": "2d"}
    answer = answer_of(ScriptedRing(["5"]), "/v1/messages", ASK | {"cache_control": mark})
    assert answer.status == 400
    assert "2d" in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"prompt_cache_key": "k"}, CacheHint("k", 300)),
        ({"prompt_cache_retention": "24h"}, CacheHint("", 86400)),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, CacheHint("k", 300)),
        ({"prompt_cache_key": "k", "prompt_cache_options": {}}, CacheHint("k", 1800)),
        ({"prompt_cache_options": {"ttl": "12h", "mode": "implicit"}}, CacheHint("", 43200)),
        ({"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}}, None),
        ({"prompt_cache_options": {"ttl": "99999h"}}, CacheHint("", 86400)),
    ],
)
def test_openais_fields(fields: dict[str, Any], expected: CacheHint | None) -> None:
    assert hint_of("/v1/chat/completions", **ASK, **fields) == expected
    assert hint_of("/v1/completions", prompt="Hi", **fields) == expected
    assert hint_of("/v1/responses", input="Hi", **fields) == expected


def test_openais_breakpoints_keep_the_prompt_up_to_the_last_one() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two", **mark},
             {"type": "text", "text": "Three"}]  # fmt: skip
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **mark}]},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
    ]
    explicit = {"prompt_cache_options": {"mode": "explicit", "ttl": "1h"}}
    chat, ask = "/v1/chat/completions", {**ASK, "messages": turns}
    assert hint_of(chat, **ask, **explicit) == CacheHint("", 3600, 0, 2, 6)
    assert hint_of(chat, **ask, prompt_cache_key="k") == CacheHint("k", 1800), "the implicit one"
    assert hint_of(chat, **ask) == CacheHint("", 1800)


def test_breakpoints_of_responses_are_those_of_items() -> None:
    part = {"type": "input_text", "text": "Two"}
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    items = [
        {"role": "user", "content": [{**part, **mark}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [part]},
    ]
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    ask = {"input": items, "instructions": "Be brief.", **explicit}
    assert hint_of("/v1/responses", **ask) == CacheHint("", 1800, 0, 2)
    assert hint_of("/v1/responses", **(ask | {"input": items[1:]})) is None


def test_a_long_key_is_refused() -> None:
    answer = answer_of(
        ScriptedRing(["5"]), "/v1/chat/completions", ASK | {"prompt_cache_key": "k" * 513}
    )
    assert (answer.status, answer.body["error"]["param"]) == (400, "prompt_cache_key")


def test_usage_says_what_was_written() -> None:
    plain = answer_of(ScriptedRing(["5"], page_size=2), "/v1/messages", ASK).body["usage"]
    kept = answer_of(ScriptedRing(["5"], page_size=2), "/v1/messages", ASK | MARK).body["usage"]
    num_prompt = plain["input_tokens"] + plain["cache_read_input_tokens"]
    assert plain["cache_creation_input_tokens"] == 0
    assert kept["cache_read_input_tokens"] == plain["cache_read_input_tokens"]
    assert sum(value for name, value in kept.items() if "input" in name) == num_prompt
    assert kept["input_tokens"] < 2 <= num_prompt


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_what_is_written_up_to_the_mark(stream: bool) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", **MARK}]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    marked = [*turns[:2], {"role": "user", "content": turns[0]["content"]}, *turns[3:]]
    for messages, expected in ((turns, 0), (marked, 2)):  # pages of 2; the ring counts messages
        ring = ScriptedRing(["5"], page_size=2)
        answer = answer_of(ring, "/v1/messages", ASK | {"messages": messages, "stream": stream})
        usage = answer.body["usage"] if not stream else usage_at_end(answer.text)
        assert usage["cache_creation_input_tokens"] == expected
        assert usage["input_tokens"] == 3 - expected


def usage_at_end(stream: str) -> Any:
    data = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
    return next(e["usage"] for e in map(json.loads, data) if e["type"] == "message_delta")


async def test_what_is_kept_is_released_by_its_key() -> None:
    ring, released = ScriptedRing(["5"]), []

    async def release_cache(key: str | None, tenant: str) -> int:
        released.append((key, tenant))
        return 3

    ring.release_cache = release_cache  # type: ignore[attr-defined]
    async with gateway_before(ring) as (_, gateway):
        path = "/v1/cache/release"
        assert (await send(gateway, path, {"prompt_cache_key": "k"})).body == {"released": 3}
        assert (await send(gateway, path, {})).body == {"released": 3}
        assert (await send(gateway, path, {"key": "k"})).status == 400
    assert released == [("k", ""), (None, "")]


async def hint_with(path: str, body: dict[str, Any], **headers: str) -> CacheHint | None:
    ring = ScriptedRing(["5"])
    async with gateway_before(ring) as (_, gateway):
        answer = await send(gateway, path, body, **headers)
        assert answer.status == 200, answer.body
    hint = ring.submitted[0][2].get("cache")
    assert hint is None or isinstance(hint, CacheHint)
    return hint


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"X_Session_Id": "s"}, None),
        ({"X_Session_Keep_Alive": "10m"}, CacheHint("", 600)),
        ({"X_Session_Id": "s", "X_Session_Keep_Alive": "90"}, CacheHint("s", 90)),
        ({"X_Dynamo_Session_Id": "d", "X_Session_Keep_Alive": "1h"}, CacheHint("d", 3600)),
        ({"X_Session_Id": "s", "X_Session_Keep_Alive": "0"}, None),
        ({"X_Session_Keep_Alive": "99999h"}, CacheHint("", 86400)),
    ],
)
async def test_headers_keep_a_session(headers: dict[str, str], expected: CacheHint | None) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": ASK, "/v1/messages": ASK, "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"}, "/generate": {"text": "Hi"},
        "/api/generate": {"model": "tiny", "prompt": "Hi", "stream": False},
    }  # fmt: skip
    for path, body in bodies.items():
        assert await hint_with(path, body, **headers) == expected, path


async def test_the_fields_of_a_body_come_before_headers() -> None:
    headers = {"X_Session_Id": "s", "X_Session_Keep_Alive": "1h"}
    chat, own = "/v1/chat/completions", {"prompt_cache_key": "k"}
    assert await hint_with(chat, ASK | own, **headers) == CacheHint("k", 300)
    assert await hint_with("/v1/messages", ASK | MARK, **headers) == CacheHint("s", 300)


@pytest.mark.parametrize(
    "headers",
    [{"X_Session_Keep_Alive": "2d"}, {"X_Session_Keep_Alive": "-1"}, {"X_Session_Id": "s" * 513}],
)
async def test_a_header_that_cannot_be_is_refused_by_name(headers: dict[str, str]) -> None:
    async with gateway_before(ScriptedRing(["5"])) as (_, gateway):
        answer = await send(gateway, "/v1/completions", {"prompt": "Hi"}, **headers)
    (name,) = headers
    assert (answer.status, answer.body["error"]["param"]) == (400, name.replace("_", "-"))
