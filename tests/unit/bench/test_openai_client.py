"""The bench over OpenAI's protocol, against a server in the same process."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bench.cli.command import EXIT_FAILED, EXIT_NO_SERVER, EXIT_OK
from bench.cli.options import parse
from bench.client.backends import OpenAIServer
from bench.client.load_generator import RequestRecord, SendOptions, drive
from bench.client.openai_client import OpenAIClient
from bench.load.workload import PlannedRequest, Prompt, Speller
from bench.serving import main
from quadriga.errors import ConfigError, ServerUnreachable
from quadriga.sampling.params import SamplingParams
from simulator.trace import TraceRequest

Reply = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "finish_reason": reason}])


async def four_tokens(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    """Write two chunks of a token, one with an incomplete text, and the last with the end."""
    for piece in ("a", "", "b"):
        await answer.write(b": a comment\n\n" + text(piece))
    await answer.write(text("c", "length") + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n")


async def two_pieces_of_an_event(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    whole = text("abcd", "length") + event(choices=[], usage=USAGE)
    await answer.write(whole[:20])
    await asyncio.sleep(0)
    await answer.write(whole[20:])


async def no_usage(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer.write(text("a") + text("b") + text("", "length"))


async def short(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    await answer.write(text("a") + text("b", "stop") + event(choices=[], usage=usage))


async def no_end(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer.write(text("a") + text("b"))


async def broken_off(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer.write(text("a"))
    assert answer._req is not None and answer._req.transport is not None
    answer._req.transport.abort()


async def error_event(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer.write(text("a") + event(error={"message": "out of memory"}))


async def garbage(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    await answer.write(b'data: {"choices": 7}\n\n')


async def chat(answer: web.StreamResponse, body: dict[str, Any]) -> None:
    for delta in ({"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}):
        await answer.write(event(choices=[{"delta": delta}]))
    await answer.write(event(choices=[{"delta": {}, "finish_reason": "length"}], usage=USAGE))


class FakeServer:
    """Streams what `reply` writes; a prompt of "refuse" is refused."""

    def __init__(self, reply: Reply = four_tokens) -> None:
        self.reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["FakeServer"]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = "http://127.0.0.1:{1}".format(*runner.addresses[0])
        try:
            yield self
        finally:
            await runner.cleanup()

    @contextmanager
    def in_a_thread(self) -> Iterator["FakeServer"]:
        """Serve in a thread, for a client that has an event loop of its own."""
        loop, started = asyncio.new_event_loop(), threading.Event()
        stop = asyncio.Event()

        async def serve() -> None:
            async with self.serving():
                started.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
        thread.start()
        assert started.wait(10)
        yield self
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "meta": {"n_vocab": 500}}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if body.get("prompt") == "refuse":
            return web.json_response({"error": "no such model"}, status=404)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await self.reply(answer, body)
        return answer


async def measure(
    server: FakeServer, *prompts: Prompt, **how: Any
) -> tuple[list[RequestRecord], dict[str, Any]]:
    async with server.serving(), OpenAIClient(OpenAIServer(server.url, **how)) as client:
        await client.info()
        jobs = [PlannedRequest(TraceRequest(0.0, (), 4), prompt) for prompt in prompts]
        run = await drive([client], jobs, SendOptions(PARAMS))
        return run.records, await client.info()


def only(reply: Reply, **how: Any) -> RequestRecord:
    return asyncio.run(measure(FakeServer(reply), "x", **how))[0][0]


def test_a_record_holds_the_servers_usage_and_a_stamp_for_each_chunk() -> None:
    server = FakeServer()
    (record,), info = asyncio.run(measure(server, [7, 8]))
    assert record.error is None
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (5, 4, 2)
    assert len(record.arrivals) == 4
    assert record.submit_start <= record.arrivals[0] <= record.arrivals[-1] == record.finished
    assert record.finish_reason == "length"
    assert info == {"model": "tiny", "vocab_size": 500, "requests_without_usage": 0}


def test_a_request_asks_for_greedy_tokens_of_full_length_and_for_usage() -> None:
    server = FakeServer()
    asyncio.run(measure(server, [7, 8]))
    assert server.bodies == [
        {
            "model": "tiny",
            "prompt": [7, 8],
            "max_tokens": 4,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_fields_are_added_and_taken_out_for_servers_that_differ() -> None:
    server = FakeServer()
    asyncio.run(measure(server, "x", model="mine", extra_body={"ignore_eos": None, "top_k": 1}))
    (body,) = server.bodies
    assert "ignore_eos" not in body
    assert (body["top_k"], body["model"]) == (1, "mine")


def test_without_usage_the_chunks_are_counted_and_the_request_is_reported() -> None:
    (record,), info = asyncio.run(measure(FakeServer(no_usage), "x"))
    assert (record.error, record.completion_tokens, info["requests_without_usage"]) == (None, 2, 1)


def test_an_event_in_two_pieces_is_one() -> None:
    record = only(two_pieces_of_an_event)
    assert (record.error, len(record.arrivals), record.completion_tokens) == (None, 1, 4)


def test_the_role_of_a_chat_is_no_token() -> None:
    server = FakeServer(chat)
    (record,), _ = asyncio.run(measure(server, "Hi", endpoint="chat"))
    assert (record.error, len(record.arrivals)) == (None, 2)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert "prompt" not in server.bodies[0]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (short, "2 tokens came where 4 were asked for (finish_reason 'stop')"),
        (no_end, "the stream ended without an end marker"),
        (broken_off, "the stream broke off"),
        (error_event, "out of memory"),
        (garbage, "in the event"),
    ],
)
def test_a_stream_that_is_not_whole_is_a_failed_request(reply: Reply, error: str) -> None:
    assert error in (only(reply).error or "no error")


def test_a_refusal_stays_with_its_request() -> None:
    records, _ = asyncio.run(measure(FakeServer(), "x", "refuse", "y"))
    assert [record.error for record in records] == [
        None,
        'RequestFailed: HTTP 404: {"error": "no such model"}',
        None,
    ]


def test_an_address_without_server_is_unreachable() -> None:
    async def ask() -> None:
        async with OpenAIClient(OpenAIServer("http://127.0.0.1:9"), 1.0) as client:
            await client.info()

    with pytest.raises(ServerUnreachable, match=r"http://127\.0\.0\.1:9/v1/models"):
        asyncio.run(ask())


def test_the_command_measures_it_like_any_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    with FakeServer().in_a_thread() as server:
        flags = "--backend openai --num-requests 3 --max-new-tokens 4 --random-input-len 6"
        url = ["--base-url", f"{server.url}/v1", "--json", str(path)]
        assert main([*flags.split(), "--no-stop-on-eos", "--verbose", *url]) == EXIT_OK
    out = capsys.readouterr().out
    assert "Model: tiny\n" in out
    assert "Tokens counted by: the server's usage\n" in out
    assert "Completion tokens (total): 12\n" in out
    summary = json.loads(path.read_text())["runs"][0]["summary"]
    assert summary["ttft"]["count"] == summary["tpot"]["count"] == 3
    assert [len(body["prompt"]) for body in server.bodies] == [6] * 6
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6


def test_the_command_reports_failures_by_its_exit_code() -> None:
    flags = ["--backend", "openai", "--num-requests", "1", "--warmup-runs", "0", "--base-url"]
    with FakeServer(no_end).in_a_thread() as server:
        assert main([*flags, server.url]) == EXIT_FAILED
    assert main([*flags, "http://127.0.0.1:9"]) == EXIT_NO_SERVER


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--base-url http://h:1", "--base-url has no effect without --backend openai"),
        ("--backend openai --base-url h:1", "must begin with http"),
        ("--backend openai --extra-body 7", "must be a JSON object"),
        ("--backend openai --extra-body {", "no JSON"),
        ("--backend openai --truncate", "--truncate"),
        ("--backend openai --endpoint tcp://127.0.0.1:5", "--endpoint would have no effect"),
        ("--backend openai --max-batch-size 8", "--max-batch-size would have no effect"),
        ("--backend openai --turns 2 --random-input-len 4", "--turns"),
        ("--backend openai --openai-endpoint chat --random-input-len 4", "--prompt-form text"),
        ("--prompt-form text", "has no effect without"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(flags.split())


def test_a_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    for key in ("", "secret"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        asyncio.run(measure(server, "x"))
    assert server.keys == [None, "Bearer secret"]


def test_a_foreign_server_gets_the_known_keys(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with FakeServer().in_a_thread() as server:
        flags = f"--backend openai --base-url {server.url} --num-prompts 3 --random-output-len 4"
        assert main([*flags.split(), "--output-file", str(path), "--no-stop-on-eos"]) == EXIT_OK
    found = json.loads(path.read_text())
    assert (found["backend"], found["model_id"], found["completed"]) == ("openai", "tiny", 3)


class WordTokenizer:
    """A tokenizer of words; `joined` counts a pair of words as one token."""

    def __init__(self, words: int, joined: bool = False) -> None:
        self._words, self._joined = words, joined
        self.ids: list[int] = []

    def get_vocab(self) -> dict[str, int]:
        letters = "abcdefghijklmnopqrstuvwxyz"
        made = [f"Ġ{a}{b}{c}" for a in letters for b in letters for c in letters][: self._words]
        return {token: index for index, token in enumerate([*made, "Ġx", "Ġ12", "abc"])}

    def encode(self, text: str, add_special_tokens: bool) -> "WordTokenizer":
        self.ids = [0] * (len(text.split()) - self._joined)
        return self


def test_ids_are_spelled_as_words_of_the_same_number() -> None:
    speller: Any = Speller(WordTokenizer(1000))  # type: ignore[arg-type]
    assert speller.spell([0, 1, 1000]) == " aaa aab aaa"
    assert speller.spell([2, 3]) != speller.spell([3, 2])


def test_a_tokenizer_that_cannot_spell_exactly_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 words became 2 tokens"):
        Speller(WordTokenizer(1000, joined=True)).spell([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="only 999 words"):
        Speller(WordTokenizer(999))  # type: ignore[arg-type]
