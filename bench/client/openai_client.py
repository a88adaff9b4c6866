"""Client of any OpenAI-compatible server, with the methods of AsyncClient that the bench uses.

It uses aiohttp, which takes 31 µs of CPU time per chunk where httpx takes 78: the client shares the
cores with the server that it measures.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from bench.client.backends import OpenAIServer
from quadriga import clock
from quadriga.client.types import Completion, Prompt, StreamChunk, Timings
from quadriga.errors import DeadlineExceeded, RequestFailed, ServerUnreachable
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import Usage

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# An environment variable, as the flags of a process are visible to all users.
KEY_VARIABLE = "OPENAI_API_KEY"
# The protocol has no token ids: a chunk counts as one token of this id.
UNKNOWN_TOKEN_ID = -1
READ_TIMEOUT_S = 600.0
MAX_SHOWN_CHARACTERS = 300


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """Whether the choice brings a token.

        A chat begins with a chunk that has only the role, and a stream may end with a chunk that
        has only the finish reason. A token whose text is incomplete comes as an empty text.
        """
        if self.delta is not None:
            return bool(self.delta.content)
        return bool(self.text) or self.finish_reason is None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_DONE = b"[DONE]"


class OpenAIClient:
    """Connections to one server, for any number of concurrent requests on one event loop.

    `connect_timeout` is long, as a busy server accepts connections late. `requests_without_usage`
    counts finished requests without usage, whose chunks were counted instead.
    """

    def __init__(self, server: OpenAIServer, connect_timeout: float = 60.0) -> None:
        self.endpoint = server.base_url.rstrip("/")
        self.requests_without_usage = 0
        self._server = server
        self._model = server.model
        self._connect_timeout = connect_timeout
        self._session: aiohttp.ClientSession | None = None
        self._counter = 0

    async def __aenter__(self) -> "OpenAIClient":
        self._session = aiohttp.ClientSession(
            self.endpoint,
            # One connection per request: some servers (llama.cpp) close idle connections between
            # two requests, and a request sent on a closing connection would fail.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._connect_timeout, sock_read=READ_TIMEOUT_S
            ),
            headers={"Content-Type": "application/json", **_authorization()},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the model's entry in /v1/models, and this client's counter.

        Raises ServerUnreachable without a list of models, and DeadlineExceeded after `timeout`.
        """
        try:
            models = await asyncio.wait_for(self._models(), timeout)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {self.endpoint} within {timeout} s") from None
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ServerUnreachable(f"{self.endpoint}/v1/models: {error!r}") from None
        named = [model for model in models if model.get("id") == self._model]
        model = (named or models or [{}])[0]
        self._model = self._model or str(model.get("id", ""))
        meta = model.get("meta") or {}
        return {
            "model": self._model,
            "vocab_size": meta.get("n_vocab"),
            "requests_without_usage": self.requests_without_usage,
        }

    async def _models(self) -> list[dict[str, Any]]:
        assert self._session is not None
        async with self._session.get("/v1/models") as answer:
            answer.raise_for_status()
            models = msgspec.json.decode(await answer.read()).get("data")
            return models if isinstance(models, list) else []

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StreamChunk]:
        """Return an iterator that sends the request when it is first advanced.

        The protocol has neither truncation nor priority. RequestFailed: the server refuses the
        request, breaks off, or ends too early.
        """
        assert truncate_prompt is None
        assert priority == 0
        self._counter += 1
        params = params or SamplingParams()
        body = msgspec.json.encode(self._body(prompt, params))
        return self._stream(f"{self._counter}", body, params)

    def _body(self, prompt: object, params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": params.ignore_eos,
        }
        if params.seed is not None and params.temperature:
            body["seed"] = params.seed
        if self._server.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        body |= self._server.extra_body
        return {name: value for name, value in body.items() if value is not None}

    async def _stream(
        self, request_id: str, body: bytes, params: SamplingParams
    ) -> AsyncIterator[StreamChunk]:
        """Yield the chunks; the last one has the completion, if the server sent a finish reason."""
        assert self._session is not None
        ending = _Ending()
        try:
            async with self._session.post(PATHS[self._server.endpoint], data=body) as answer:
                if answer.status != 200:
                    raise RequestFailed(f"HTTP {answer.status}: {_short(await answer.read())}")
                async for event, now in _events(answer.content):
                    if ending.take(event, now):
                        yield StreamChunk(request_id, "", [UNKNOWN_TOKEN_ID], [], now)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise RequestFailed(f"the stream broke off: {error!r}") from None
        if ending.finish_reason is not None:
            completion = self._complete(request_id, ending, params)
            yield StreamChunk(request_id, "", [], [], ending.at, completion)

    def _complete(self, request_id: str, ending: "_Ending", params: SamplingParams) -> Completion:
        usage = ending.usage
        if usage is None or usage.completion_tokens is None:
            self.requests_without_usage += 1
            counted = Usage(0, ending.chunks, 0)
        else:
            details = usage.prompt_tokens_details
            cached = (details.cached_tokens if details is not None else None) or 0
            counted = Usage(usage.prompt_tokens, usage.completion_tokens, cached)
            if params.ignore_eos and counted.completion_tokens != params.max_new_tokens:
                raise RequestFailed(
                    f"{counted.completion_tokens} tokens came where {params.max_new_tokens} were"
                    f" asked for (finish_reason {ending.finish_reason!r})"
                )
        reason = ending.finish_reason or ""
        return Completion(request_id, "", [], reason, counted, Timings(0.0))


class _Ending:
    """Collects what a completion needs from a stream; `at` is the arrival of the last choice."""

    def __init__(self) -> None:
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.chunks = 0
        self.at = 0.0

    def take(self, event: _Event, now: float) -> bool:
        """Record an event and return whether it has a token. Raise RequestFailed for an error."""
        if event.error is not None:
            raise RequestFailed(f"the server reports: {_short(msgspec.json.encode(event.error))}")
        if event.usage is not None:
            self.usage = event.usage
        if not event.choices:
            return False
        self.at = now
        choice = event.choices[0]
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.chunks += choice.has_token
        return choice.has_token


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[_Event, float]]:
    """Yield the events of a server-sent stream, each with the time at which it was read."""
    rest = b""
    async for data in content.iter_any():
        read_at = clock.now()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line[5:].strip() if line.startswith(b"data:") else b""
            if not payload or payload == _DONE:
                continue
            try:
                yield _decode(payload), read_at
            except msgspec.DecodeError as error:
                raise RequestFailed(f"{error} in the event {_short(payload)}") from None


def _authorization() -> dict[str, str]:
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def _short(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + " ..."
