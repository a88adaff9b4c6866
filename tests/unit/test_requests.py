"""What the front door lets in, and what it says of the rest."""

import math
import os
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import InvalidRequest, PromptTooLong
from quadriga.messages import MAX_FRAME_BYTES, Generate, Ping, pack_ids
from quadriga.model_source import ModelFiles
from quadriga.sampling import DEFAULT_MAX_NEW_TOKENS, SamplingParams
from quadriga.sockets import encode
from tokenizer_proc import requests

VOCAB = 100


def model(context: int = 16) -> ModelFiles:
    config = {"vocab_size": VOCAB, "max_position_embeddings": context, "eos_token_id": [7, 9]}
    return ModelFiles("m", "m", config, {}, Path(), None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_k", -2),
        ("top_k", 2**63),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", [""]),
        ("stop", ["x" * 1000]),
        ("stop", ["x"] * 100),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 1000),
    ],
)
def test_a_value_out_of_range_is_named_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).validate(VOCAB)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field} is")


def test_default_parameters_are_valid() -> None:
    SamplingParams().validate(VOCAB)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (["generate", 1, "id", "x", {"temperature": "hot"}], "temperature"),
        (["generate", 1, "id", "x", {"no_such_field": 1}], "no_such_field"),
        (["generate", 1, "id", 5, {}], "$[3]"),
        (["generate", 1, "id", [{"role": "user"}], {}], "content"),
        (["generate", 1, 17, "x", {}], "$[2]"),
        (["no_such_tag", 1, "id"], "no_such_tag"),
        (["generate", 99, "id", "x"], "version is 99"),
        (["generate"], "length 4"),
        ({"tag": "generate"}, "array"),
        (17, "array"),
    ],
)
def test_a_wrong_message_is_refused_by_the_name_of_what_is_wrong(wrong: Any, named: str) -> None:
    frames = [msgspec.msgpack.encode(wrong)]
    with pytest.raises(InvalidRequest) as caught:
        requests.parse(frames)
    assert named in str(caught.value)


def test_the_sender_of_a_wrong_message_hears_of_it_under_its_own_id() -> None:
    frame = msgspec.msgpack.encode(["generate", 1, "my-id", "x", {"temperature": "hot"}])
    assert requests.salvage_request_id([frame]) == "my-id"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_invalid_request(data: bytes) -> None:
    try:
        requests.parse([data])
    except InvalidRequest:
        requests.salvage_request_id([data])


@pytest.mark.parametrize(
    "data",
    [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 1_000_000, os.urandom(1000)],
)
def test_hostile_lengths_and_depths_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        requests.parse([data])


def test_a_frame_over_the_limit_is_refused_with_size_and_limit() -> None:
    with pytest.raises(InvalidRequest, match=f"{MAX_FRAME_BYTES + 1} bytes: at most"):
        requests.parse([b"x" * (MAX_FRAME_BYTES + 1)])


def test_a_message_of_several_frames_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="this one has 2"):
        requests.parse([encode(Ping(1)), b""])


@pytest.mark.parametrize("wrong", [VOCAB, -1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    message = Generate(1, "id", "", prompt_token_ids=pack_ids([1, wrong]))
    with pytest.raises(InvalidRequest, match=f"holds {wrong}: ids of this model are 0 to 99"):
        requests.check_ids(message, VOCAB)


def test_ids_of_a_broken_length_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="5 bytes"):
        requests.check_ids(Generate(1, "id", "", prompt_token_ids=b"12345"), VOCAB)


def test_a_prompt_beside_token_ids_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="both given"):
        requests.check_ids(Generate(1, "id", "x", prompt_token_ids=pack_ids([1])), VOCAB)


def test_an_empty_prompt_becomes_the_end_of_text_token() -> None:
    ids, _ = requests.fit(array("i"), SamplingParams(), model(), truncate=False)
    assert ids.tolist() == [7]


def test_a_request_that_just_fits_the_context_is_taken_and_one_token_more_is_not() -> None:
    params = SamplingParams(max_new_tokens=6)
    ids, fitted = requests.fit(array("i", range(10)), params, model(16), truncate=False)
    assert (len(ids), fitted.max_new_tokens) == (10, 6)
    with pytest.raises(PromptTooLong) as caught:
        requests.fit(array("i", range(11)), params, model(16), truncate=False)
    for part in ("11 tokens", "max_new_tokens is 6", "context is 16", "--allow-auto-truncate"):
        assert part in str(caught.value)


def test_a_huge_max_new_tokens_is_refused_with_the_limit() -> None:
    with pytest.raises(PromptTooLong, match="max_new_tokens is 1000000000"):
        requests.fit(array("i", [1]), SamplingParams(max_new_tokens=10**9), model(), truncate=False)


def test_truncation_keeps_the_last_tokens_and_leaves_room_for_one() -> None:
    params = SamplingParams(max_new_tokens=6)
    ids, fitted = requests.fit(array("i", range(40)), params, model(16), truncate=True)
    assert ids.tolist() == list(range(25, 40))
    assert fitted.max_new_tokens == 1


def test_an_unset_max_new_tokens_is_the_default_or_what_the_context_leaves() -> None:
    _, fitted = requests.fit(array("i", range(10)), SamplingParams(), model(16), truncate=False)
    assert fitted.max_new_tokens == 6
    _, fitted = requests.fit(array("i", range(10)), SamplingParams(), model(4096), truncate=False)
    assert fitted.max_new_tokens == DEFAULT_MAX_NEW_TOKENS


def test_a_request_without_a_seed_gets_one_and_a_given_seed_stays() -> None:
    _, fitted = requests.fit(array("i", [1]), SamplingParams(), model(), truncate=False)
    assert fitted.seed is not None
    _, fitted = requests.fit(array("i", [1]), SamplingParams(seed=5), model(), truncate=False)
    assert fitted.seed == 5
