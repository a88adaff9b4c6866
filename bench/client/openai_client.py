"""A client of any OpenAI-compatible server, with as much of AsyncClient's face as the bench needs.

On aiohttp: a chunk costs it 31 µs of CPU time where httpx takes 78, and the client shares the
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
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.errors import DeadlineExceeded, RequestFailed, ServerUnreachable
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.public import Usage

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
KEY_VARIABLE = "OPENAI_API_KEY"
"""Not a flag, which everybody sees who lists the processes."""
NO_ID = -1
"""The protocol has no token ids: a chunk stands for one token."""
SILENT_SECONDS = 600.0
"""How long a stream may say nothing before its request fails."""
SHOWN_BODY = 300


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_token(self) -> bool:
        """A chat begins with a chunk that names the role, and a stream may end with one that only
        says why; a token whose text is not whole yet comes as an empty one."""
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
    """Connections to one server; any number of requests at once. Use it on one event loop.

    connect_timeout: seconds until ServerUnreachable; a server that has much to do on few cores
    takes new connections late. requests_without_usage: how many ended
    without the server saying how many tokens they had; their chunks were counted instead.
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
            # A connection for each request: servers close idle ones when they like, llama.cpp's
            # even between two requests, and a request that meets that would fail.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._connect_timeout, sock_read=SILENT_SECONDS
            ),
            headers={"Content-Type": "application/json", **_authorization()},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """What /v1/models says of the model, and what this client counted.

        ServerUnreachable: nobody answers, or not with a list of models. DeadlineExceeded.
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
        prompt: str | list[int],
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
        priority: int = 0,
    ) -> AsyncIterator[StreamChunk]:
        """Send when the iterator is first asked; the protocol knows no truncation and no priority.

        Raises RequestFailed where the server refuses, breaks off, or ends too soon.
        """
        assert truncate_prompt is None and priority == 0
        self._counter += 1
        params = params or SamplingParams()
        body = msgspec.json.encode(self._body(prompt, params))
        return self._stream(f"{self._counter}", body, params)

    def _body(self, prompt: str | list[int], params: SamplingParams) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": params.max_new_tokens,
            "temperature": params.temperature,
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
        """Chunks as they come; the last one carries the completion, where the server ended it."""
        assert self._session is not None
        ending = _Ending()
        try:
            async with self._session.post(PATHS[self._server.endpoint], data=body) as answer:
                if answer.status != 200:
                    raise RequestFailed(f"HTTP {answer.status}: {_short(await answer.read())}")
                async for event, now in _events(answer.content):
                    if ending.take(event, now):
                        yield StreamChunk(request_id, "", [NO_ID], [], now)
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
    """What is known of a request's end so far. at: when its last choice came, Unix seconds."""

    def __init__(self) -> None:
        self.usage: _Usage | None = None
        self.finish_reason: str | None = None
        self.chunks = 0
        self.at = 0.0

    def take(self, event: _Event, now: float) -> bool:
        """Whether the event brings a token. RequestFailed where it is an error."""
        if event.error is not None:
            raise RequestFailed(f"the server says: {_short(msgspec.json.encode(event.error))}")
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
    """The events of a server-sent stream, each with the time at which its bytes were read."""
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
    return text if len(text) <= SHOWN_BODY else text[:SHOWN_BODY] + " ..."
