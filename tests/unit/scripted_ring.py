"""A gateway in the test's process, in front of a scripted ring."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from bench.client.server import free_port
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel, ServedModels
from http_proc.server import bind, listen, make_runner, tls_context
from http_proc.web.resumable import STREAM_ROWS
from http_proc.web.stream_rows import StreamRows
from quadriga.client.types import Completion, RenderedPrompt, StreamChunk, Timings, TokenLogprob
from quadriga.clock import now
from quadriga.errors import QuadrigaError
from quadriga.server.answer_format import AnswerFormat, CallFormat, CallStyle, to_info
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.adapters.store import AdapterStore
from quadriga.wire.client import Accepted, RequestProgress, RequestState, Usage
from quadriga.wire.live import LiveMessage

HERMES = CallFormat(
    style=CallStyle.JSON, call_open="<tool_call>\n", call_close="\n</tool_call>", separator="\n"
)
LLAMA3 = CallFormat(style=CallStyle.JSON, arguments_key="parameters", separator=";")
FACTS = {
    "ready": True,
    "context_length": 100,
    "chat": True,
    "answer_format": to_info(AnswerFormat(calls=HERMES, takes_tools=True)),
    "fill_format": None,
    "model_details": {"family": "llama"},
    "pids": {},
}
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Rain?"}]}
TIMEOUT_S = 60.0


class ScriptedHandle:
    def __init__(self, name: str) -> None:
        self.request_id = name
        self.done = False
        self.aborted = False

    def abort(self) -> None:
        self.aborted = self.aborted or not self.done
        self.done = True


class ScriptedRing:
    """A replacement of AsyncClient.

    Each request is answered with `pieces` at once, or with `error`. With `leaves_open` it never
    finishes.

    Attributes:
        prompt_end: the end of the rendered prompt, as the ring reports it.
        logprobs: makes the logprobs of a piece.
        live: the messages of the live feed.
        adapters: the adapters of its model.
    """

    adapters: AdapterStore | None = None

    def __init__(
        self, pieces: list[str], *, leaves_open: Any = False, error: Any = None, **facts: Any
    ) -> None:
        self.pieces = pieces
        self.leaves_open: bool = leaves_open
        self.error: QuadrigaError | None = error
        self.finish_reason = "stop"
        self.logprobs: Callable[[str], list[TokenLogprob]] | None = None
        self.prompt_end = ""
        self.progress_of_each = RequestProgress(RequestState.UNKNOWN)
        self.questions: list[list[str]] = []
        self.num_prompt_tokens = 3
        self.facts = {**FACTS, "pages_total": 1, "pages_held": 0, **facts}
        self.handles: list[ScriptedHandle] = []
        self.sinks: list[Any] = []
        self.tenants: list[str] = []
        self.live: asyncio.Queue[LiveMessage] = asyncio.Queue()
        self.num_watches = 0
        self.watched: list[int] = []
        self.submitted: list[tuple[Any, Any, dict[str, Any]]] = []

    def submit(
        self,
        prompt: Any,
        params: Any,
        *,
        sink: Any,
        on_accepted: Any = None,
        tenant: str = "",
        **options: Any,
    ) -> ScriptedHandle:
        self.tenants.append(tenant)
        handle = ScriptedHandle(str(len(self.handles)))
        if on_accepted is not None and self.error is None:
            hint = options.get("cache")
            num_kept = 0 if hint is None else hint.num_messages or self.num_prompt_tokens
            accepted = Accepted("r", self.num_prompt_tokens, self.prompt_end, num_kept)
            asyncio.get_running_loop().call_soon(on_accepted, accepted)
        self.handles.append(handle)
        self.sinks.append(sink)
        self.submitted.append((prompt, params, options))
        self._answer(handle, sink)
        return handle

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        loop = asyncio.get_running_loop()
        if self.error is not None:
            handle.done = True
            loop.call_soon(sink, self.error)
            return
        for number, piece in enumerate(self.pieces):
            is_last = number == len(self.pieces) - 1 and not self.leaves_open
            handle.done = is_last
            part = chunk(piece, self.completion() if is_last else None)
            part.logprobs = self.logprobs(piece) if self.logprobs else None
            loop.call_soon(sink, part)

    def completion(self) -> Completion:
        timings = Timings(now(), token_times=[now()])
        usage = Usage(3, len(self.pieces), 0)
        return Completion("r", "".join(self.pieces), [1], self.finish_reason, usage, timings)

    async def connect(self) -> None:
        pass

    async def tokenize(self, prompt: Any, chat: Any) -> list[int]:
        if self.error is not None:
            raise self.error
        self.submitted.append((prompt, None, {"chat": chat}))
        return [1] * self.num_prompt_tokens

    async def render(self, prompt: Any, chat: Any = None) -> RenderedPrompt:
        if self.error is not None:
            raise self.error
        self.submitted.append((prompt, None, {"chat": chat}))
        return RenderedPrompt("rendered", [1] * self.num_prompt_tokens)

    async def progress(self, request_ids: list[str], timeout: float) -> list[RequestProgress]:
        self.questions.append(request_ids)
        return [self.progress_of_each] * len(request_ids)

    async def watch(self, replica: int = 0) -> AsyncGenerator[LiveMessage, None]:
        self.num_watches += 1
        self.watched.append(replica)
        if self.error is not None:
            raise self.error
        while True:
            yield await self.live.get()

    async def info(self, timeout: float) -> dict[str, Any]:
        return self.facts

    async def abort(self, request_id: str) -> None:
        raise AssertionError("not expected")


def chunk(text: str, completion: Completion | None = None) -> StreamChunk:
    return StreamChunk("r", text, [1], [0.0], 0.0, completion)


def served(config: ServerConfig, ring: Any, name: str = "", *aliases: str) -> ServedModel:
    """Return a model that a ring answers."""
    if name:
        config = config.replace(served_model_name=name)
    interval_s = config.http.sse_ping_interval
    adapters = getattr(ring, "adapters", None)
    return ServedModel(
        config, ring, adapters=adapters, ping_interval_s=interval_s, name=name, aliases=aliases
    )


@asynccontextmanager
async def gateway_before(
    rings: ScriptedRing | Mapping[str, ScriptedRing],
    rows: StreamRows | None = None,
    run_dir: Path | None = None,
    /,
    **flags: Any,
) -> AsyncIterator[tuple[str, Gateway]]:
    """Yield the URL of a gateway, and the gateway.

    Args:
        rings: one, or several by the name of the model, which has its aliases behind it.
        rows: where it keeps its streams.
        run_dir: directory of its run.
        flags: its flags.
    """
    port = free_port()
    config = ServerConfig().replace(**{"served_model_name": "tiny", "port": port} | flags)
    of_names = {"": rings} if isinstance(rings, ScriptedRing) else rings
    gateway = Gateway(
        config,
        ServedModels([served(config, ring, *names.split()) for names, ring in of_names.items()]),
        run_dir,
    )
    gateway[STREAM_ROWS] = rows or StreamRows()
    runner = await make_runner(gateway)
    server = await listen(runner, bind(config.http), tls_context(config.http), gateway)
    try:
        yield config.http.url, gateway
    finally:
        server.close()
        await runner.cleanup()


def run_at_gateway(
    ring: ScriptedRing,
    test: Callable[[Gateway], Awaitable[None]],
    run_loop: Any = asyncio.run,
    **flags: Any,
) -> None:
    """Run a test with a gateway in front of a ring, within TIMEOUT_S."""

    async def run() -> None:
        async with gateway_before(ring, **flags) as (_, gateway):
            await test(gateway)

    run_loop(asyncio.wait_for(run(), TIMEOUT_S))


@asynccontextmanager
async def openai_before(
    ring: ScriptedRing, **flags: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Gateway]]:
    """Yield OpenAI's client of a gateway, and that gateway."""
    async with (
        gateway_before(ring, **flags) as (url, gateway),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield client, gateway
