"""What crosses a process boundary comes out as it went in, and nothing else comes through."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import (
    Chunk,
    Chunks,
    ClientMessage,
    End,
    Generate,
    ServerMessage,
    StageTimes,
    Usage,
)
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.sockets import encode

int32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(int32))
def test_ids_survive_packing_as_little_endian_int32(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert unpack_ids(packed).tolist() == ids
    assert packed == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)


@pytest.mark.parametrize("wrong", [2**31, -(2**31) - 1, 2**70])
def test_an_id_that_does_not_fit_is_an_error_not_another_id(wrong: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([wrong])


@given(
    st.text(),
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 2),
        top_k=st.integers(-1, 100),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop=st.text() | st.lists(st.text()),
        stop_token_ids=st.lists(st.integers(0, 50000)),
    ),
)
def test_a_request_comes_out_of_the_codec_as_it_went_in(
    prompt: str, params: SamplingParams
) -> None:
    message = Generate(1, "id", prompt, params)
    assert msgspec.msgpack.decode(encode(message), type=ClientMessage) == message


def test_a_result_comes_out_of_the_codec_as_it_went_in() -> None:
    end = End("stop", Usage(3, 1, 0), StageTimes(1.0, 2.0, 3.0, 4.0, 5.0), "\n")
    message = Chunks([Chunk("id", 0, "né", pack_ids([5]), [4.0], end)])
    assert msgspec.msgpack.decode(encode(message), type=ServerMessage) == message


def test_defaults_stay_off_the_wire() -> None:
    assert msgspec.msgpack.decode(encode(SamplingParams())) == {}


def test_an_infinite_number_survives_so_that_validation_can_name_it() -> None:
    message = Generate(1, "id", "x", SamplingParams(temperature=math.inf))
    decoded = msgspec.msgpack.decode(encode(message), type=ClientMessage)
    assert decoded == message
