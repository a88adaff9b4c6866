"""Forks of resumable streams: the request again, from one of its tokens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from http_proc.core.gateway import Gateway
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.wire.client import Usage
from tests.unit.http.streams.stream_clients import (
    BODIES,
    CHAT,
    MINE,
    OTHER,
    events_of,
    gateway_on,
    reading,
    streaming,
)
from tests.unit.scripted_ring import ScriptedHandle, ScriptedRing, gateway_before

TOKENS = [11, 12, 13, 14]
EOS = 2


class NumberedRing(ScriptedRing):
    """A ring whose answers have the tokens of `tokens`, one in each chunk, after the given ones.

    Attributes:
        tokens: of an answer.
        matched_stop: what ends it.
    """

    def __init__(self, tokens: list[int] = TOKENS, matched_stop: Any = None) -> None:
        super().__init__([])
        self.tokens, self.matched_stop = tokens, matched_stop

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        loop, params = asyncio.get_running_loop(), self.submitted[-1][1]
        for index in range(params.n):
            pieces = [(token, 1.0) for token in self.tokens]
            given = params.first_token_ids
            if given:
                chunk = self._chunk(index, given, [0.0] * len(given))
                chunk.text_lengths = [1] * len(given)
                loop.call_soon(sink, chunk)
            for token, time in pieces:
                loop.call_soon(sink, self._chunk(index, [token], [time]))
            if not self.leaves_open:
                loop.call_soon(sink, self._end(index, [*given, *self.tokens]))
        handle.done = not self.leaves_open

    def _chunk(self, index: int, ids: list[int], times: list[float]) -> StreamChunk:
        return StreamChunk("r", "".join(map(chr, map(_letter, ids))), ids, times, 0.0, index=index)

    def _end(self, index: int, ids: list[int]) -> StreamChunk:
        text, usage = "".join(map(chr, map(_letter, ids))), Usage(3, len(ids), 0)
        times = Timings(1.0, token_times=[1.0])
        end = Completion("r", text, ids, "stop", usage, times, self.matched_stop, index)
        return StreamChunk("r", "", [], [], 0.0, end, index)


def _letter(token: int) -> int:
    return 54 + token  # 11 is A


@asynccontextmanager
async def forking(
    gateway: Gateway, stream_id: str, headers: dict[str, str] | None = None, **fields: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a fork."""
    url = f"{gateway.args.url}/v1/streams/{stream_id}/fork"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=fields, headers=headers) as response,
    ):
        yield response


async def fork(gateway: Gateway, stream_id: str, **fields: Any) -> dict[str, Any]:
    """Return the whole answer of a fork."""
    params = {"stream": False} | fields.pop("params", {})
    async with forking(gateway, stream_id, params=params, **fields) as response:
        body: dict[str, Any] = await response.json()
        assert response.status == 200, body
        return body


async def ended(gateway: Gateway, path: str = "/v1/completions", **fields: Any) -> str:
    """Return the id of a stream that has ended."""
    async with streaming(gateway, path, **fields) as response:
        await events_of(response)
        return response.headers["X-Stream-Id"]


async def refusal(gateway: Gateway, stream_id: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    async with forking(gateway, stream_id, **fields) as response:
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize("path", BODIES)
async def test_a_fork_is_the_request_again_with_the_first_tokens(path: str) -> None:
    ring = NumberedRing()
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway, path, temperature=0.5)
        answer = await fork(gateway, name, at_token=2, params={"temperature": 0.25, "top_k": 7})
    (prompt, first, options), (again, params, others) = ring.submitted
    assert again == prompt
    assert (first.first_token_ids, first.temperature) == ([], 0.5)
    assert (params.first_token_ids, params.temperature, params.top_k) == ([11, 12], 0.25, 7)
    assert {"chat", "cache_salt", "priority"} & options.keys() <= others.keys()
    assert answer["model"] == "tiny"


async def test_a_fork_goes_on_in_the_text_of_its_stream() -> None:
    async with gateway_before(NumberedRing()) as (_, gateway):
        name = await ended(gateway)
        for count, text in enumerate(["ABCD", "AABCD", "ABABCD", "ABCABCD", "ABCDABCD"]):
            answer = await fork(gateway, name, at_token=count)
            assert answer["choices"][0]["text"] == text
        assert (await fork(gateway, name))["choices"][0]["text"] == "ABCDABCD"


async def test_the_stop_token_at_the_end_is_left_out_by_default() -> None:
    ring = NumberedRing([11, 12, EOS], EOS)
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway)
        for fields, ids in [({}, [11, 12]), ({"at_token": 3}, [11, 12, EOS])]:
            await fork(gateway, name, **fields)
            assert ring.submitted[-1][1].first_token_ids == ids


async def test_a_streamed_fork_is_a_resumable_stream_and_forks_itself() -> None:
    ring = NumberedRing()
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway)
        headers = {"X-Request-Id": "branch"}
        async with forking(gateway, name, headers, at_token=1) as response:
            assert response.headers["X-Stream-Id"] == "branch"
            events = await events_of(response)
        async with reading(gateway, "branch", 2) as response:
            assert await events_of(response) == events[2:]
        async with forking(gateway, name, headers, at_token=1) as response:
            assert await events_of(response) == events  # the same fork again
        assert len(ring.submitted) == 2
        status, error = await refusal(gateway, name, headers=headers, at_token=2)
        assert (status, error["code"]) == (409, "stream_exists")
        answer = await fork(gateway, "branch", at_token=2)
        assert answer["choices"][0]["text"] == "AAABCD"


async def test_the_kept_tokens_are_one_event() -> None:
    async with gateway_before(NumberedRing()) as (_, gateway):
        name = await ended(gateway)
        async with forking(gateway, name, at_token=3) as response:
            events = await events_of(response)
    texts = [
        msgspec.json.decode(event.split(b"data: ")[1])["choices"][0]["text"]
        for event in events[:-1]
    ]
    assert texts == ["ABC", "A", "B", "C", "D", ""]


async def test_branches_are_choices() -> None:
    ring = NumberedRing()
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway, "/v1/chat/completions", seed=5, n=3)
        answer = await fork(gateway, name, index=2, at_token=1, n=4)
        assert [choice["message"]["content"] for choice in answer["choices"]] == ["AABCD"] * 4
        assert ring.submitted[-1][1].seed == 5
        await fork(gateway, name, at_token=1)
        assert ring.submitted[-1][1].n == 1
        status, error = await refusal(gateway, name, index=3)
    assert (status, error["param"]) == (400, "index")
    assert "index is 3: the stream has 3 choices" in error["message"]


async def test_a_seed_that_the_stream_has_drawn_is_not_repeated() -> None:
    ring = NumberedRing()
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway)
        await fork(gateway, name)
        async with forking(gateway, name) as response:
            await events_of(response)
    first, second, third = (params.seed for _, params, _ in ring.submitted)
    assert second is None  # the client draws one
    assert first is not None and third is not None and first != third


async def test_a_choice_of_several_prompts_keeps_its_own() -> None:
    ring = NumberedRing()
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway, prompt=["x", "y"], n=2)
        await fork(gateway, name, index=2, at_token=1)
    assert [prompt for prompt, _, _ in ring.submitted] == ["x", "y", "y"]


@pytest.mark.parametrize(
    ("fields", "params", "expected"),
    [
        ({"max_completion_tokens": 9}, {"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_tokens": 9}, {"max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"response_format": {"type": "json_object"}}, {"regex": "a+"}, {"regex": "a+"}),
        ({"regex": "a+"}, {"regex": None}, {"regex": None}),
        ({"stop": "x"}, {"stop": ["y"]}, {"stop": ["y"]}),
    ],
)
async def test_params_take_the_place_of_fields_that_mean_the_same(
    fields: dict[str, Any], params: dict[str, Any], expected: dict[str, Any]
) -> None:
    ring = NumberedRing()
    async with gateway_before(ring) as (_, gateway):
        name = await ended(gateway, "/v1/chat/completions", **fields)
        await fork(gateway, name, at_token=1, params=params)
    sent = ring.submitted[-1][1]
    assert {field: getattr(sent, field) for field in expected} == expected
    assert sent.json_schema is None


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"at_token": 5}, "at_token", "at_token is 5, and choice 0 of stream .* with 4 tokens"),
        ({"at_token": -1}, "at_token", ">= 0"),
        ({"params": {"messages": []}}, "params.messages", "the prompt and the model of its stream"),
        ({"params": {"temprature": 0}}, "temprature", "is not a field of this request"),
        ({"n": 0}, "n", "must be from 1 to 128"),
        ({"token": 1}, "token", "is not a field of this request"),
    ],
)
async def test_what_cannot_be_forked_is_refused_with_its_field(
    fields: dict[str, Any], param: str, message: str
) -> None:
    async with gateway_before(NumberedRing()) as (_, gateway):
        name = await ended(gateway)
        status, error = await refusal(gateway, name, **fields)
    assert (status, error["param"]) == (400, param)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error["message"])


async def test_a_running_stream_forks_at_tokens_that_it_has_and_that_are_to_come() -> None:
    ring = NumberedRing()
    ring.leaves_open = True
    async with gateway_before(ring) as (_, gateway), streaming(gateway) as response:
        name = response.headers["X-Stream-Id"]
        await events_of(response, 4)
        ring.leaves_open = False
        assert (await fork(gateway, name, at_token=2))["choices"][0]["text"] == "ABABCD"
        assert (await fork(gateway, name))["choices"][0]["text"] == "ABCDABCD"
        later = asyncio.ensure_future(fork(gateway, name, at_token=5))
        await asyncio.sleep(0.05)
        assert not later.done()
        ring.sinks[0](ring._chunk(0, [15], [2.0]))
        assert (await later)["choices"][0]["text"] == "ABCDEABCD"


async def test_a_stream_of_another_key_or_none_is_not_forked(tmp_path: Path) -> None:
    async with gateway_on(tmp_path, NumberedRing()) as gateway:
        async with streaming(gateway, headers=MINE) as response:
            name = response.headers["X-Stream-Id"]
            await events_of(response)
        for headers, stream_id, status in [(OTHER, name, 403), (MINE, "unknown", 404)]:
            async with forking(gateway, stream_id, headers) as response:
                assert response.status == status
        async with forking(gateway, f"cmpl-{name}", MINE, at_token=1) as response:
            assert response.status == 200


async def test_an_ended_stream_forks_at_the_next_gateway(tmp_path: Path) -> None:
    async with (
        gateway_on(tmp_path, NumberedRing()) as gateway,
        streaming(gateway, headers=MINE) as response,
    ):
        name = response.headers["X-Stream-Id"]
        await events_of(response)
    ring = NumberedRing()
    async with (
        gateway_on(tmp_path, ring) as gateway,
        forking(gateway, name, MINE, params={"stream": False}) as response,
    ):
        answer = await response.json()
    assert answer["choices"][0]["text"] == "ABCDABCD"
    assert ring.submitted[-1][1].first_token_ids == TOKENS


async def test_a_fork_goes_on_at_the_next_gateway(tmp_path: Path) -> None:
    ring = NumberedRing()
    async with gateway_on(tmp_path, ring) as gateway:
        async with streaming(gateway, headers=MINE) as response:
            name = response.headers["X-Stream-Id"]
            await events_of(response)
        ring.leaves_open = True
        async with forking(gateway, name, MINE, at_token=2) as response:
            branch = response.headers["X-Stream-Id"]
            before = await events_of(response, 3)
    after = NumberedRing()
    async with (
        gateway_on(tmp_path, after) as gateway,
        reading(gateway, branch, headers=MINE) as response,
    ):
        whole = await events_of(response)
    assert whole[:3] == before
    assert after.submitted[0][1] == ring.submitted[1][1]


async def test_a_response_of_a_conversation_is_forked_with_the_items_that_it_had(
    tmp_path: Path,
) -> None:
    ring = NumberedRing()
    hello: Any = {"type": "message", "role": "user", "content": "Hello."}
    async with gateway_before(ring, data_dir=str(tmp_path)) as (url, gateway):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
        async with client:
            talk = await client.conversations.create(items=[hello])
            name = await ended(gateway, "/v1/responses", conversation=talk.id)
            await fork(gateway, name, at_token=1)
            items = (await client.conversations.items.list(talk.id)).data
    (prompt, *_), (again, params, _) = ring.submitted
    assert [turn["content"] for turn in prompt] == ["Hello.", "x"]
    assert again == prompt
    assert params.first_token_ids == [11]
    assert len(items) == 3  # the fork is no part of the conversation


async def test_a_chat_with_messages_is_forked_in_anthropics_format() -> None:
    ring = NumberedRing()
    body = {"model": "tiny", "max_tokens": 9, **CHAT}
    headers = {"X-Resumable": "true"}
    async with gateway_before(ring) as (_, gateway):
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                f"{gateway.args.url}/v1/messages", json=body | {"stream": True}, headers=headers
            ) as response,
        ):
            name = response.headers["X-Stream-Id"]
            await events_of(response)
        answer = await fork(gateway, name, at_token=2)
    assert answer["content"] == [{"type": "text", "text": "ABABCD"}]
