"""The client library.

    with Client() as client:
        print(client.generate("The capital of France is").text)

A prompt is a string, a list of token ids, or a chat as a list of {"role", "content"} maps. A list
of prompts gives a list of completions in the same order. AsyncClient is the same on an event loop.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from quadriga.async_client import NO_CHAT_OPTIONS, AsyncClient, RequestOptions
from quadriga.completion import Completion, Prompt, StreamChunk, Timings
from quadriga.config import DEFAULT_ENDPOINT
from quadriga.handle import Handle
from quadriga.messages.public import ChatOptions
from quadriga.sampling import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "AsyncClient",
    "ChatOptions",
    "Client",
    "Completion",
    "RequestOptions",
    "SamplingParams",
    "StreamChunk",
    "Timings",
]

T = TypeVar("T")


class Client:
    """AsyncClient for programs without an event loop; its methods may be called from any thread."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        curve_dir: str | Path | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="quadriga-client", daemon=True
        )
        self._thread.start()
        self._async = AsyncClient(endpoint, connect_timeout, reconnect_timeout, curve_dir)

    def __enter__(self) -> "Client":
        self._run(self._async.connect())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what is under way, disconnect and end the thread."""
        if self._loop.is_running():
            self._run(self._async.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: list[Prompt],
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: "Unpack[RequestOptions]"
    ) -> Completion | list[Completion]:
        """As AsyncClient.generate."""
        result: Completion | list[Completion] = self._run(
            self._async.generate(prompt, params, **options)
        )
        return result

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Iterator[StreamChunk]:
        """As AsyncClient.stream."""
        handle = self._run(self._submit(prompt, params, options))
        try:
            while True:
                try:
                    yield self._run(anext(handle))
                except StopAsyncIteration:
                    return
        finally:
            if self._loop.is_running():
                self._loop.call_soon_threadsafe(handle.abort)

    async def _submit(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
    ) -> Handle:
        await self._async.connect()
        return self._async.submit(prompt, params, **options)

    def abort(self, request_id: str = "") -> None:
        """As AsyncClient.abort."""
        self._run(self._async.abort(request_id))

    def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """As AsyncClient.info."""
        return self._run(self._async.info(timeout))

    def flush_cache(self, timeout: float = 10.0) -> int:
        """As AsyncClient.flush_cache."""
        return self._run(self._async.flush_cache(timeout))

    def tokenize(self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS) -> list[int]:
        """As AsyncClient.tokenize."""
        return self._run(self._async.tokenize(prompt, chat))

    def detokenize(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """As AsyncClient.detokenize."""
        return self._run(self._async.detokenize(token_ids, skip_special_tokens))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
