"""Large bodies are refused by the number of their values, or served without delaying others."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from http_proc.core.call import (
    MAX_COMMAS,
    MAX_CONTAINERS,
    MAX_DIGITS,
    MAX_STRINGS,
    SMALL_BYTES,
    check_shape,
)
from http_proc.core.errors import ApiError
from http_proc.generation.chat_call import MAX_CONTENT_PARTS
from quadriga.wire.client import MAX_NAME_CHARS, MAX_TEMPLATE_ARGS, MAX_TOOLS, MAX_TURNS
from tests.unit.scripted_ring import ScriptedRing, gateway_before

MAX_HOLD_S = 1.0
"""CPU time of the process between two turns of the event loop: far more than a body takes."""
BEAT_S = 0.002


def listed(item: bytes, count: int) -> bytes:
    return b'{"prompt":[' + b",".join([item] * count) + b"]}"


def text(content: bytes) -> bytes:
    return b'{"prompt":"' + content + b'"}'


def shape_error(body: bytes) -> str:
    try:
        asyncio.run(check_shape(body))
    except ApiError as error:
        return f"{error.status}: {error}"
    return ""


TOO_MANY = {
    "objects and arrays": (listed(b"[]", MAX_CONTAINERS), listed(b"{}", MAX_CONTAINERS)),
    "strings": (
        listed(b'"a"', MAX_STRINGS),
        listed(b'"\\\\"', MAX_STRINGS),
        text(b'","' * MAX_STRINGS),
    ),
    "values": (listed(b"1", MAX_COMMAS + 2),),
    "digits": (listed(b"1." + b"1" * 300 + b"e-300", 2000),),
}


@pytest.mark.parametrize(
    ("what", "body"), [(what, body) for what, bodies in TOO_MANY.items() for body in bodies]
)
def test_a_body_of_too_many_pieces_is_refused_by_their_number(what: str, body: bytes) -> None:
    message = shape_error(body)
    assert message.startswith("400: ") and what in message


@pytest.mark.parametrize(
    "body",
    [
        text(b"{[,]}" * MAX_COMMAS),
        text(b'\\"a\\",{}' * MAX_STRINGS),
        text(b"\\\\" * (MAX_STRINGS * 4)),
        text(b'\\\\\\"[' * MAX_STRINGS),
        text(b"7" * SMALL_BYTES * 2),
        listed(b"123456", MAX_COMMAS),
        listed(b'"a"', MAX_STRINGS - 1),
        listed(b"[]", MAX_CONTAINERS - 2),
        listed(b"[]", SMALL_BYTES // 3 - 10),
        b'{"prompt":"' + b"x" * SMALL_BYTES,
    ],
    ids=range(10),
)
def test_signs_within_a_text_and_pieces_within_the_bounds_pass(body: bytes) -> None:
    assert shape_error(body) == ""


def test_the_bounds_hold_before_any_is_checked_at_a_small_body() -> None:
    assert SMALL_BYTES // 2 < MAX_COMMAS
    assert MAX_DIGITS < SMALL_BYTES


TURN = {"role": "user", "content": "x"}
PART = {"type": "text", "text": ""}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [TURN], "max_tokens": 2} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", "max_tokens": 2} | fields).encode()


OVER_A_BOUND: dict[str, tuple[Callable[[], bytes], str]] = {
    "messages": (lambda: chat(messages=[TURN] * (MAX_TURNS + 1)), f"at most {MAX_TURNS}"),
    "no message": (lambda: chat(messages=[]), "length >= 1"),
    "parts": (
        lambda: chat(messages=[{"role": "user", "content": [PART] * (MAX_CONTENT_PARTS + 1)}]),
        "content parts",
    ),
    "name": (lambda: chat(messages=[TURN | {"name": "n" * (MAX_NAME_CHARS + 1)}]), "a name of"),
    "call id": (
        lambda: chat(messages=[TURN | {"tool_call_id": "n" * (MAX_NAME_CHARS + 1)}]),
        "a tool_call_id of",
    ),
    "tools": (lambda: chat(tools=[TOOL] * (MAX_TOOLS + 1)), f"at most {MAX_TOOLS}"),
    "calls": (
        lambda: chat(messages=[{"role": "assistant", "content": "", "tool_calls": [CALL] * 5000}]),
        "tool calls",
    ),
    "kwargs": (
        lambda: chat(chat_template_kwargs=dict.fromkeys(map(str, range(MAX_TEMPLATE_ARGS + 1)))),
        "chat_template_kwargs has 65 variables",
    ),
}
# Name -> (body, part of the error message, or "" if the body is served).
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "150,000 turns": (
        lambda: chat(messages=[{"role": "user", "content": ""}] * 150_000),
        "the body has",
    ),
    "150,000 parts": (
        lambda: chat(messages=[TURN | {"content": [PART] * 150_000}]),
        "the body has",
    ),
    "a role of 3 MB": (lambda: chat(messages=[{"role": "a b " * 710_000, "content": "x"}]), "role"),
    "a name of 3 MB": (lambda: chat(messages=[TURN | {"name": "a b " * 710_000}]), "a name of"),
    "100,000 tools": (lambda: chat(tools=[TOOL] * 100_000), "the body has"),
    "100,000 biases": (
        lambda: completion(logit_bias={str(i): 1 for i in range(100_000)}),
        "at most 1024",
    ),
    "400,000 biases": (
        lambda: completion(logit_bias={str(i): 1 for i in range(400_000)}),
        "the body has",
    ),
    "400,000 stops": (lambda: completion(stop=["a"] * 400_000), "the body has"),
    "130,000 stops": (lambda: completion(stop=["a"] * 130_000), "at most 16"),
    "a million lists": (lambda: b'{"metadata":' + listed(b"[]", 10**6) + b"}", "the body has"),
    "2 million digits": (lambda: listed(b"1", 2 * 10**6), "the body has"),
    "long floats": (lambda: listed(b"1." + b"1" * 300 + b"e-300", 10_000), "digits"),
    "a text of 3 MB": (lambda: chat(messages=[TURN | {"content": '{[,"\\' * 300_000}]), ""),
    "keyword arguments of 3 MB": (lambda: chat(chat_template_kwargs={"x": "a b " * 710_000}), ""),
    "arguments of 3 MB": (
        lambda: chat(
            messages=[
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        CALL
                        | {
                            "function": {
                                "name": "f",
                                "arguments": json.dumps({"a": "a b " * 710_000}),
                            }
                        }
                    ],
                }
            ]
        ),
        "",
    ),
}


def post(url: str, body: bytes) -> str:
    """Return status and message of an error, or "" for a 200."""
    path = "/v1/chat/completions" if b'"messages"' in body[:64] else "/v1/completions"
    try:
        urllib.request.urlopen(urllib.request.Request(url + path, body), timeout=60).read()
    except urllib.error.HTTPError as error:
        return f"{error.code}: {json.loads(error.read())['error']['message']}"
    return ""


@pytest.mark.parametrize("name", OVER_A_BOUND)
async def test_a_chat_over_a_bound_is_a_400_that_names_it(name: str) -> None:
    make, said = OVER_A_BOUND[name]
    async with gateway_before(ScriptedRing(["a"])) as (url, _):
        message = await asyncio.to_thread(post, url, make())
        assert message.startswith("400: ") and said in message


async def test_large_bodies_do_not_hold_up_the_event_loop() -> None:
    holds: dict[str, float] = {}

    async def beat(name: str) -> None:
        """Note the longest CPU time of the process, all threads, without a turn of the loop."""
        while True:
            before = time.process_time()
            await asyncio.sleep(BEAT_S)
            holds[name] = max(holds.get(name, 0.0), time.process_time() - before)

    async with gateway_before(ScriptedRing(["a"])) as (url, _):
        for name, (make, said) in HOSTILE.items():
            body = make()
            beating = asyncio.create_task(beat(name))
            message = await asyncio.to_thread(post, url, body)
            beating.cancel()
            expected = "400: " if said else ""
            assert message.startswith(expected) and said in message, (name, message)
            assert bool(said) == bool(message)
    assert max(holds.values()) < MAX_HOLD_S, holds
