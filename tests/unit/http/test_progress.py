"""Streams that wait: when the headers come, comments, timings, and what costs nothing."""

import asyncio
from typing import Any

import aiohttp
import openai
import pytest

from http_proc.core import progress
from http_proc.core.gateway import Gateway
from http_proc.core.progress import comment, furthest
from quadriga.errors import QueueFull, RequestFailed, ServerFailed
from quadriga.wire.client import MAX_PROGRESS_IDS, RequestProgress, RequestState
from tests.unit.scripted_ring import TIMEOUT_S, ScriptedRing, chunk, gateway_before, run_at_gateway
from tests.waiting import wait_until_async

PREPARING, QUEUED, PREFILL, DECODING, UNKNOWN = RequestState
WAITING = RequestProgress(QUEUED, 7, 12.3)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all times a tenth."""
    for name in ("HEADERS_AFTER_S", "FIRST_POLL_S", "POLL_INTERVAL_S", "MIN_POLL_GAP_S"):
        monkeypatch.setattr(progress, name, getattr(progress, name) / 10)


def silent_ring() -> ScriptedRing:
    """Return a ring that accepts a request and answers nothing."""
    ring = ScriptedRing([], leaves_open=True)
    ring.progress_of_each = WAITING
    return ring


async def ask(gateway: Gateway, body: dict[str, Any], path: str = "completions") -> Any:
    """Return the response to a request whose headers have arrived."""
    session = aiohttp.ClientSession()
    prompt = {} if "messages" in body else {"prompt": "x"}
    fields = prompt | {"stream": True} | body
    response = await session.post(f"{gateway.args.url}/v1/{path}", json=fields)
    response.session = session  # type: ignore[attr-defined]
    return response


async def leave(response: Any) -> None:
    response.close()
    await response.session.close()


@pytest.mark.parametrize("state", [PREFILL, DECODING])
async def test_the_headers_come_when_a_request_is_admitted(
    state: RequestState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HEADERS_AFTER_S", 3600.0)
    ring = silent_ring()
    ring.progress_of_each = RequestProgress(state)
    async with gateway_before(ring) as (_, gateway):
        response = await ask(gateway, {})
        assert response.status == 200
        timing = response.headers["Server-Timing"]
        assert [part.partition(";")[0] for part in timing.split(", ")] == ["tokenize", "queue"]
        await leave(response)


@pytest.mark.parametrize("fails", [False, True])
async def test_the_headers_of_a_queued_request_come_after_5_s(fails: bool) -> None:
    ring = silent_ring()
    if fails:

        async def no_answer(*_: object) -> list[RequestProgress]:
            raise ServerFailed("gone")

        ring.progress = no_answer  # type: ignore[method-assign, assignment]
    async with gateway_before(ring) as (_, gateway):
        earlier: list[bool] = []
        loop = asyncio.get_running_loop()
        loop.call_later(progress.HEADERS_AFTER_S - 0.02, earlier.append, True)
        response = await ask(gateway, {})
        assert response.status == 200
        assert earlier, "the headers came before their time"
        await leave(response)


async def test_a_refusal_before_the_headers_is_a_status_and_an_error_after_them_an_event() -> None:
    ring = silent_ring()
    async with gateway_before(ring) as (_, gateway):
        ring.error = QueueFull("full", 3)
        response = await ask(gateway, {})
        assert (response.status, response.headers["Retry-After"]) == (429, "3")
        await leave(response)
        ring.error = None
        early = asyncio.create_task(ask(gateway, {}))
        await wait_until_async(lambda: len(ring.sinks) == 2, TIMEOUT_S)
        ring.sinks[1](RequestFailed("the worker died"))
        response = await early
        assert response.status == 500
        await leave(response)
        response = await ask(gateway, {})
        ring.sinks[2](RequestFailed("the worker died"))
        text = await response.text()
        assert response.status == 200 and text.endswith("data: [DONE]\n\n")
        assert '"error":{"message":"the worker died"' in text
        await leave(response)


async def test_a_silent_stream_gets_comments_at_the_interval_and_none_before_it() -> None:
    ring = silent_ring()
    async with gateway_before(ring, sse_ping_interval=0.4) as (_, gateway):
        response = await ask(gateway, {})
        earlier: list[bool] = []
        asyncio.get_running_loop().call_later(0.3, earlier.append, True)
        assert await response.content.readline() == b": queued 7, about 12 s\n"
        assert earlier, "the comment came before the interval had passed"
        assert await response.content.readline() == b"\n"
        ring.progress_of_each = RequestProgress(PREFILL, 0, None, 43, 100)
        assert await response.content.readline() == b": prefill 43 %\n"
        ring.sinks[0](chunk("x", ring.completion()))
        text = await response.text()
        assert text.lstrip("\n").startswith("data: {") and ":" not in text[0]
        await leave(response)


async def test_openais_client_skips_comments_and_keeps_the_timings() -> None:
    ring = silent_ring()
    async with gateway_before(ring, sse_ping_interval=0.1) as (_, gateway):
        url = f"{gateway.args.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "x"}]
            stream = await client.chat.completions.create(
                model="tiny", messages=messages, stream=True
            )
            ring_answers = asyncio.get_running_loop().call_later(
                0.5, ring.sinks[0], chunk("hello", ring.completion())
            )
            parts = [part async for part in stream]
            ring_answers.cancel()
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "hello"
        assert parts[-1].timings["cached_tokens"] == 0  # type: ignore[attr-defined]
        assert len(ring.questions) >= 2


def test_a_stream_that_is_not_silent_or_wants_no_pings_gets_no_comment() -> None:
    ring = silent_ring()

    async def test(gateway: Gateway) -> None:
        response = await ask(gateway, {})
        num_questions = len(ring.questions)
        for _ in range(8):
            ring.sinks[0](chunk("x"))
            await asyncio.sleep(0.05)
        ring.sinks[0](chunk("x", ring.completion()))
        assert not [line for line in (await response.text()).split("\n") if line[:1] == ":"]
        assert len(ring.questions) == num_questions
        await leave(response)

    run_at_gateway(ring, test, sse_ping_interval=0.2)
    ring = silent_ring()
    run_at_gateway(ring, test, sse_ping_interval=0)


async def test_a_client_that_leaves_while_its_request_is_queued_ends_it() -> None:
    ring = silent_ring()
    async with gateway_before(ring) as (_, gateway):
        early = asyncio.create_task(ask(gateway, {}))
        await wait_until_async(lambda: ring.handles, TIMEOUT_S)
        early.cancel()
        await wait_until_async(lambda: ring.handles[0].aborted, TIMEOUT_S)
        late = await ask(gateway, {})
        await leave(late)
        await wait_until_async(lambda: ring.handles[1].aborted, TIMEOUT_S)
        await wait_until_async(lambda: not gateway.num_open, TIMEOUT_S)
        assert not gateway.models.default.progress._watches


async def test_streams_that_wait_share_a_question_and_nothing_is_asked_about_others() -> None:
    ring = silent_ring()
    async with gateway_before(ring) as (_, gateway):
        asked = [asyncio.create_task(ask(gateway, {"prompt": ["x"] * 10})) for _ in range(10)]
        await wait_until_async(lambda: len(ring.handles) == 100, TIMEOUT_S)
        await wait_until_async(
            lambda: len({name for ids in ring.questions for name in ids}) == 100, TIMEOUT_S
        )
        assert max(map(len, ring.questions)) <= MAX_PROGRESS_IDS
        assert len(ring.questions) <= 6
        for response in await asyncio.gather(*asked):
            await leave(response)
        await wait_until_async(lambda: not gateway.num_open, TIMEOUT_S)
        before = len(ring.questions)
        ring.pieces, ring.leaves_open = ["a", "b"], False
        response = await ask(gateway, {})
        assert "[DONE]" in await response.text()
        await leave(response)
        await asyncio.sleep(3 * progress.FIRST_POLL_S)
        assert len(ring.questions) == before
        assert gateway.models.default.progress._timer is None


async def test_answers_have_timings_in_the_last_chunk_or_with_the_usage() -> None:
    ring = ScriptedRing(["a", "b"])
    names = ("queue_ms", "prefill_ms", "ttft_ms", "decode_ms", "tokens_per_second", "cached_tokens")
    async with gateway_before(ring) as (_, gateway):
        for path in ("completions", "chat/completions"):
            chat: Any = {"messages": [{"role": "user", "content": "x"}]}
            fields = chat if path.startswith("chat") else {}
            response = await ask(gateway, {**fields, "stream": False}, path)
            assert tuple((await response.json())["timings"]) == names
            assert "decode;dur=" in response.headers["Server-Timing"]
            await leave(response)
            for options, place in (({}, "finish_reason"), ({"include_usage": True}, "usage")):
                response = await ask(gateway, {**fields, "stream_options": options}, path)
                lines = [line for line in (await response.text()).split("\n") if "timings" in line]
                assert len(lines) == 1 and f'"{place}":' in lines[0]
                assert ('"choices":[]' in lines[0]) == bool(options)
                await leave(response)


def test_comments_say_how_far_the_furthest_request_is() -> None:
    values = [RequestProgress(UNKNOWN), RequestProgress(QUEUED, 9), RequestProgress(QUEUED, 3, 0.2)]
    assert comment(furthest(values)) == b": queued 3, about 1 s\n\n"
    assert comment(furthest(values[:2])) == b": queued 9\n\n"
    assert comment(furthest([*values, RequestProgress(PREPARING)])) == b": queued 3, about 1 s\n\n"
    assert comment(furthest([*values, RequestProgress(DECODING)])) == b": decoding\n\n"
    assert comment(furthest(values[:1])) == b": waiting for the server\n\n"


async def test_an_event_without_a_meaning_follows_each_comment_of_a_response() -> None:
    ring = silent_ring()
    async with gateway_before(ring, sse_ping_interval=0.1) as (_, gateway):
        url = f"{gateway.args.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client,
            client.responses.stream(model="tiny", input="x") as stream,
        ):
            events: list[Any] = []
            async for event in stream:
                events.append(event)
                if sum(event.type == "keepalive" for event in events) == 2:
                    ring.sinks[0](chunk("hello", ring.completion()))
            answer = await stream.get_final_response()
        assert answer.output_text == "hello"
        kinds = [event.type for event in events]
        assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
        assert kinds[-1] == "response.completed"
        numbers = [event.sequence_number for event in events if event.type != "keepalive"]
        assert numbers == list(range(len(numbers)))
