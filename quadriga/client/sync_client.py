"""Client: AsyncClient for programs without an event loop."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from quadriga.client.async_client import NO_CHAT_OPTIONS, AsyncClient, RequestOptions
from quadriga.client.loop_thread import LoopThread
from quadriga.client.types import Completion, Prompt, StreamChunk
from quadriga.config.server_config import DEFAULT_ENDPOINT
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.public import ChatOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Client:
    """AsyncClient for programs without an event loop; its methods may be called from any thread."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        curve_dir: str | Path | None = None,
    ) -> None:
        self._loop = LoopThread("quadriga-client")
        self._async = AsyncClient(endpoint, connect_timeout, reconnect_timeout, curve_dir)

    def __enter__(self) -> "Client":
        try:
            self._loop.run(self._async.connect)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort all requests, disconnect and end the thread."""
        self._loop.end(self._async.close)

    @overload  # a str is a sequence of str, too, but the first overload wins
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **options: "Unpack[RequestOptions]"
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt or a list of prompts; see AsyncClient.generate."""
        result: Completion | list[Completion] = self._loop.run(
            lambda: self._async.generate(prompt, params, **options)
        )
        return result

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of a completion as they come; see AsyncClient.stream."""
        return self._loop.iterate(self._async.stream(prompt, params, **options))

    def abort(self, request_id: str = "") -> None:
        """Abort a request, or all of them; see AsyncClient.abort."""
        self._loop.run(lambda: self._async.abort(request_id))

    def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return gauges and counters of the server; see AsyncClient.info."""
        return self._loop.run(lambda: self._async.info(timeout))

    def flush_cache(self, timeout: float = 10.0) -> int:
        """Drop unused cached prefixes; see AsyncClient.flush_cache."""
        return self._loop.run(lambda: self._async.flush_cache(timeout))

    def tokenize(self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS) -> list[int]:
        """Return the token ids of a text or a chat; see AsyncClient.tokenize."""
        return self._loop.run(lambda: self._async.tokenize(prompt, chat))

    def detokenize(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; see AsyncClient.detokenize."""
        return self._loop.run(lambda: self._async.detokenize(token_ids, skip_special_tokens))
