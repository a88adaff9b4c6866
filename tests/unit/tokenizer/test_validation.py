"""The checks of messages: what is accepted, and the errors for everything else."""

import asyncio
import math
import os
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.client import AsyncClient
from quadriga.errors import InvalidRequest, PromptTooLong
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.validation import UnservedTokens, validate_params
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.wire.client import MAX_FRAME_BYTES, Generate, Ping, Refused
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import encode
from quadriga.wire.to_scheduler import Submit
from tests.unit.tokenizer.frontend_world import VOCAB, FrontendWorld, Recorder, model
from tokenizer_proc.preparation import validation

IDS = UnservedTokens(VOCAB)


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
        validate_params(SamplingParams(**{field: value}), VOCAB)
    assert caught.value.field == field
    assert str(caught.value).startswith((f"{field} is", f"{field} holds"))


def test_default_parameters_are_valid() -> None:
    validate_params(SamplingParams(), VOCAB)


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
    frame = msgspec.msgpack.encode(wrong)
    with pytest.raises(InvalidRequest) as caught:
        validation.parse(frame)
    assert named in str(caught.value)


def test_the_sender_of_an_invalid_message_gets_an_error_under_its_own_id() -> None:
    frame = msgspec.msgpack.encode(["generate", 1, "my-id", "x", {"temperature": "hot"}])
    assert validation.peek(frame) == ("generate", "my-id")


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_invalid_request(data: bytes) -> None:
    try:
        validation.parse(data)
    except InvalidRequest:
        validation.peek(data)


@pytest.mark.parametrize(
    "data",
    [b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 1_000_000, os.urandom(1000)],
)
def test_hostile_lengths_and_depths_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        validation.parse(data)


def test_a_frame_over_the_limit_is_refused_with_size_and_limit() -> None:
    with pytest.raises(InvalidRequest, match=f"{MAX_FRAME_BYTES + 1} bytes: at most"):
        validation.only_frame([b"x" * (MAX_FRAME_BYTES + 1)])


def test_a_message_of_several_frames_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="this one has 2"):
        validation.only_frame([encode(Ping(1)), b""])


@pytest.mark.parametrize("wrong", [VOCAB, -1, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_named(wrong: int) -> None:
    message = Generate(1, "id", "", prompt_token_ids=pack_ids([1, wrong]))
    with pytest.raises(InvalidRequest, match=f"holds {wrong}: ids of this model are 0 to 99"):
        validation.check_prompt_ids(message, IDS)


def test_ids_of_a_broken_length_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="5 bytes"):
        validation.check_prompt_ids(Generate(1, "id", "", prompt_token_ids=b"12345"), IDS)


def test_a_prompt_beside_token_ids_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="both given"):
        validation.check_prompt_ids(Generate(1, "id", "x", prompt_token_ids=pack_ids([1])), IDS)


def test_an_empty_prompt_becomes_the_end_of_text_token() -> None:
    ids, _ = validation.fit(array("i"), SamplingParams(), model(), 64, truncate=False)
    assert ids.tolist() == [7]


def test_a_request_that_just_fits_the_context_is_taken_and_one_token_more_is_not() -> None:
    params = SamplingParams(max_new_tokens=6)
    ids, fitted = validation.fit(array("i", range(10)), params, model(16), 64, truncate=False)
    assert (len(ids), fitted.max_new_tokens) == (10, 6)
    with pytest.raises(PromptTooLong) as caught:
        validation.fit(array("i", range(11)), params, model(16), 64, truncate=False)
    for part in ("11 tokens", "max_new_tokens is 6", "context is 16", "--allow-auto-truncate"):
        assert part in str(caught.value)


def test_a_huge_max_new_tokens_is_refused_with_the_limit() -> None:
    with pytest.raises(PromptTooLong, match="max_new_tokens is 1000000000"):
        validation.fit(
            array("i", [1]), SamplingParams(max_new_tokens=10**9), model(), 64, truncate=False
        )


def test_truncation_keeps_the_last_tokens_and_leaves_room_for_one() -> None:
    params = SamplingParams(max_new_tokens=6)
    ids, fitted = validation.fit(array("i", range(40)), params, model(16), 64, truncate=True)
    assert ids.tolist() == list(range(25, 40))
    assert fitted.max_new_tokens == 1


def test_an_unset_max_new_tokens_is_the_default_or_what_the_context_leaves() -> None:
    _, fitted = validation.fit(
        array("i", range(10)), SamplingParams(), model(16), 64, truncate=False
    )
    assert fitted.max_new_tokens == 6
    _, fitted = validation.fit(
        array("i", range(10)), SamplingParams(), model(4096), 64, truncate=False
    )
    assert fitted.max_new_tokens == 64


def test_a_request_without_a_seed_gets_one_and_a_given_seed_stays() -> None:
    _, fitted = validation.fit(array("i", [1]), SamplingParams(), model(), 64, truncate=False)
    assert fitted.seed is not None
    _, fitted = validation.fit(array("i", [1]), SamplingParams(seed=5), model(), 64, truncate=False)
    assert fitted.seed == 5


# --- how soon -------------------------------------------------------------------------------------

WEEK = 7 * 24 * 3600


def generate(**fields: Any) -> Generate:
    return Generate(1, "id", "", prompt_token_ids=pack_ids([1]), **fields)


def pass_through_frontend(message: bytes, args: FrontendArgs) -> Submit | Refused:
    """Return what a client's message becomes in a frontend."""
    world = FrontendWorld(max_queued=4096, args=args)
    world.frontend.on_public([b"client", message])
    answers = [msgspec.msgpack.decode(sent, type=Refused) for sent in world.port.sent]
    (answer,) = world.scheduler.sent + answers
    assert isinstance(answer, Submit | Refused)
    return answer


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1001),
        ("priority", -1001),
        ("priority", 2**62),
        *(
            (field, value)
            for field in ("queue_timeout", "timeout")
            for value in (0.0, -1.0, math.nan, math.inf, -math.inf, WEEK + 1.0)
        ),
    ],
)
def test_a_priority_or_timeout_out_of_range_is_named_with_its_limits(
    field: str, value: float
) -> None:
    refused = pass_through_frontend(encode(generate(**{field: value})), FrontendArgs())
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.error.field) == ("invalid_request", field)
    assert refused.error.message.startswith(f"{field} is {value}: ")
    assert "must be" in refused.error.message
    assert ("1000" if field == "priority" else str(WEEK)) in refused.error.message


@pytest.mark.parametrize("priority", [-1000, 0, 1000])
@pytest.mark.parametrize("seconds", [1e-3, 1, float(WEEK), None])
def test_priority_and_timeouts_within_their_range_are_taken(
    priority: int, seconds: float | None
) -> None:
    validation.check_urgency(generate(priority=priority, queue_timeout=seconds, timeout=seconds))


TIMEOUTS = {"queue_timeout": 3.0, "request_timeout": 60.0}


@pytest.mark.parametrize(
    ("flags", "fields", "queue_s", "whole_s"),
    [
        ({}, {}, None, None),
        ({}, {"queue_timeout": 2.5, "timeout": 40}, 2.5, 40),
        (TIMEOUTS, {}, 3, 60),
        (TIMEOUTS, {"queue_timeout": 9, "timeout": 5}, 9, 5),
    ],
)
def test_timeouts_of_a_request_or_else_of_the_server_are_deadlines_that_count_from_the_arrival(
    flags: dict[str, float], fields: dict[str, float], queue_s: float | None, whole_s: float | None
) -> None:
    message = encode(generate(priority=7, **fields))
    submit = pass_through_frontend(message, FrontendArgs(**flags))  # type: ignore[arg-type]
    assert isinstance(submit, Submit) and submit.priority == 7
    for deadline, seconds in ((submit.queue_deadline, queue_s), (submit.deadline, whole_s)):
        assert deadline == (None if seconds is None else submit.received_at + seconds)


# --- what the client library sends ----------------------------------------------------------------


def sent_by_the_client(**options: Any) -> list[Generate]:
    """Return the messages of submit, stream and generate with the same options."""
    connection = Recorder()

    async def talk() -> None:
        client = AsyncClient()
        client._connection = connection  # type: ignore[assignment]
        client.submit([1], **options)
        stream = asyncio.ensure_future(anext(client.stream([1], **options)))
        whole = asyncio.ensure_future(client.generate([[1], [2]], **options))
        await asyncio.sleep(0)
        for task in (stream, whole):
            task.cancel()
        await asyncio.gather(stream, whole, return_exceptions=True)

    asyncio.run(talk())
    return [message for message in connection.sent if isinstance(message, Generate)]


def test_the_clients_options_travel_with_the_request() -> None:
    messages = sent_by_the_client(priority=-3, queue_timeout=1.5, timeout=20, truncate_prompt=True)
    assert [message.stream for message in messages] == [True, True, False, False]
    for message in messages:
        assert (message.priority, message.queue_timeout, message.timeout) == (-3, 1.5, 20)
        assert message.truncate_prompt is True
        submit = pass_through_frontend(encode(message), FrontendArgs())
        assert isinstance(submit, Submit)
        assert submit.deadline == submit.received_at + 20


def test_options_that_a_client_omits_keep_their_defaults() -> None:
    for message in sent_by_the_client():
        assert (message.priority, message.queue_timeout, message.timeout) == (0, None, None)


def test_an_option_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(TypeError, match="no_such_option"):
        sent_by_the_client(no_such_option=1)
