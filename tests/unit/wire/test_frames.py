"""Every message of the public socket is encoded as the committed frames are.

Where a message was added: `python -m tests.unit.frames --write`. It must change no old frame.
"""

import json
from typing import Any

import msgspec
import pytest

from quadriga.wire.client import (
    Accepted,
    Chunk,
    Chunks,
    PlainAccepted,
    Replay,
    ServerMessage,
    encode_chunks,
)
from quadriga.wire.sockets import encode
from tests.unit.frames import GOLDEN, LINKS, Values, expected, field_names, listed, messages, recode

KNOWN = expected()


@pytest.mark.parametrize("link", LINKS)
def test_every_message_has_frames(link: str) -> None:
    assert set(messages(link)) == set(KNOWN[link])


@pytest.mark.parametrize("link", LINKS)
def test_a_frame_is_decoded_and_encoded_to_the_same_bytes(link: str) -> None:
    for tag, frames in KNOWN[link].items():
        for frame in map(bytes.fromhex, frames["whole"]):
            assert recode(link, frame).hex(" ") == frame.hex(" "), tag


@pytest.mark.parametrize("link", LINKS)
def test_fields_that_are_left_out_have_the_same_defaults(link: str) -> None:
    for tag, frames in KNOWN[link].items():
        short, whole = map(bytes.fromhex, frames["short"])
        assert recode(link, short).hex(" ") == whole.hex(" "), tag


def test_fields_have_their_names_and_places() -> None:
    """A new name alone changes no byte: write the file again and see that no frame differs."""
    for link, tag, frames in listed(KNOWN):
        assert list(field_names(messages(link)[tag])) == frames["fields"], f"{link}: {tag}"


def test_the_types_of_fields_are_those_of_the_frames() -> None:
    for link, tag, frames in listed(KNOWN):
        drawn = [Values(turn).of(messages(link)[tag]) for turn in range(3)]
        sent = {recode(link, msgspec.msgpack.encode(message)).hex() for message in drawn}
        assert sent == set(frames["whole"]), f"{link}: {tag}"


def test_accepted_has_three_fields_for_a_request_that_keeps_nothing() -> None:
    frame = encode(PlainAccepted("a", 3, "end"))
    assert msgspec.msgpack.decode(frame) == ["accepted", "a", 3, "end"]
    assert msgspec.msgpack.decode(frame, type=ServerMessage) == Accepted("a", 3, "end")


SENT = json.loads(GOLDEN.with_name("sent_chunks.json").read_text())
"""Messages as the server sends them, whose chunks have the first six fields."""


@pytest.mark.parametrize("tag", ["chunks", "replay"])
def test_chunks_are_sent_without_fields_that_say_nothing(tag: str) -> None:
    for frame in map(bytes.fromhex, SENT[tag]):
        message = msgspec.msgpack.decode(frame, type=Chunks | Replay)
        assert encode_chunks(message).hex(" ") == frame.hex(" ")


@pytest.mark.parametrize(
    ("rest", "num_fields"),
    [
        ((0, None, None, None), 6),
        ((1, None, None, None), 9),
        ((0, None, None, [1]), 10),
        ((0, None, None, None, b"1234"), 11),
    ],
)
def test_a_chunk_has_as_many_fields_as_it_needs(rest: tuple[Any, ...], num_fields: int) -> None:
    chunk = Chunk("a", 0, "t", b"1234", [1.0], None, *rest)
    (fields,) = msgspec.msgpack.decode(encode_chunks(Chunks([chunk])))[1]
    assert len(fields) == num_fields
    assert msgspec.msgpack.decode(encode_chunks(Chunks([chunk])), type=Chunks).chunks == [chunk]
