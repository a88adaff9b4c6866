"""Integers beyond 64 bits reach the server in maps of schemas and arguments."""

from typing import Any

import msgspec
import pytest

from quadriga.errors import InvalidRequest
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import ChatOptions, Generate
from quadriga.wire.packing import MAX_DIGITS, with_large_integers
from quadriga.wire.sockets import encode
from tokenizer_proc.preparation.validation import parse

SCHEMA = {"enum": [2**64, -(2**63) - 1, 2**64 - 1, -(2**63), 10**MAX_DIGITS - 1, 5, True, 1.5]}


def request(schema: Any) -> Generate:
    options = ChatOptions(tools=[{"function": {"name": "f", "parameters": schema}}])
    return Generate(1, "r", "Hi", SamplingParams(json_schema=schema), chat=options)


def test_integers_of_any_size_arrive_as_they_were_sent() -> None:
    message = request(SCHEMA)
    with pytest.raises(OverflowError):
        encode(message)
    found = parse(encode(with_large_integers(message)))
    assert found == message
    assert isinstance(found, Generate) and found.params.json_schema == SCHEMA


def test_longer_integers_are_refused() -> None:
    with pytest.raises(OverflowError, match="1024 digits"):
        with_large_integers(request({"const": 10**MAX_DIGITS}))
    for digits in (b"", b"-", b"5x", b"1" * (MAX_DIGITS + 2), b"\xff"):
        ext = msgspec.msgpack.Ext(1, digits)
        frame = msgspec.msgpack.encode(["generate", 1, "r", "Hi", {"json_schema": {"const": ext}}])
        with pytest.raises(InvalidRequest):
            parse(frame)
