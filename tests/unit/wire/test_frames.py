"""Every message on the wire is encoded as the committed frames are.

Where a message was added: `python -m tests.unit.frames --write`. It must change no old frame.
"""

import msgspec
import pytest

from tests.unit.frames import LINKS, Values, expected, field_names, listed, messages, recode

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
