"""AsyncClient: one connection to a server, any number of requests at once."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from quadriga.client.connection import CLOSED_BY_CALLER, Connection, Events
from quadriga.client.inflight import Pending
from quadriga.client.request_handle import Handle, Sink
from quadriga.client.types import NO_CHAT_OPTIONS as NO_CHAT_OPTIONS
from quadriga.client.types import (
    Completion,
    Prompt,
    StreamChunk,
    check_is_one_prompt,
    is_list_of_prompts,
    is_time_limit,
    wire_prompt,
)
from quadriga.client.types import RequestOptions as RequestOptions
from quadriga.config.server_config import DEFAULT_ENDPOINT
from quadriga.errors import DeadlineExceeded, InvalidRequest, ServerFailed, ServerStopping
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.public import (
    PROTOCOL_VERSION,
    Abort,
    ChatOptions,
    ClientMessage,
    Detokenize,
    FlushCache,
    Generate,
    GetInfo,
    Info,
    ServerGone,
    ServerMessage,
    Text,
    Tokenize,
    Tokens,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncClient:
    """One connection to a server; any number of requests at once. Use it on one event loop.

    A connection that breaks is made again, and what was under way goes on where it stood.

    endpoint: the server's public socket. connect_timeout: seconds until ServerUnreachable.
    reconnect_timeout: seconds that a server which was there may take to be back, until then.
    curve_dir: the directory with this client's keys, where the server asks for them.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        connect_timeout: float = 5.0,
        reconnect_timeout: float = 30.0,
        curve_dir: str | Path | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._identity = uuid.uuid4()
        self._counter = 0
        self._pending = Pending(lambda message: self._connection.send(message), reconnect_timeout)
        events = Events(
            message=self._on_message,
            interrupted=self._pending.interrupt,
            back=self._pending.resend,
            lost=self._pending.fail_all,
        )
        keys = Path(curve_dir) if curve_dir else None
        self._connection = Connection(endpoint, self._identity, events, reconnect_timeout, keys)

    async def __aenter__(self) -> "AsyncClient":
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Find the server; every call does so first. Calls at the same time share one attempt.

        Raises ServerUnreachable after connect_timeout; once connected, the reason why the
        connection was lost, if it was and the server is not back; RequestAborted when the client is
        closed meanwhile."""
        await self._connection.open(self._connect_timeout)

    async def _connect_within(self, timeout: float | None) -> None:
        """As `connect`, but DeadlineExceeded where the call that needs it has less time."""
        if self._connection.is_open or not is_time_limit(timeout):
            await self.connect()
            return
        try:
            await asyncio.wait_for(self.connect(), timeout)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(
                f"not connected to {self.endpoint} within {timeout} s, the timeout of this call"
            ) from None

    async def close(self) -> None:
        """Abort what is under way and disconnect: every call that waits ends with RequestAborted.
        The next call connects again."""
        if self._pending.has_requests:
            self._connection.send(Abort(PROTOCOL_VERSION, ""))
        self._pending.fail_all(CLOSED_BY_CALLER)
        await self._connection.close(linger=1)

    # --- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        sink: Sink | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Handle:
        """Send a request at once, or as soon as a server that is being searched is back. The client
        must be connected. options: see RequestOptions.

        sink: is called with what comes, from the event loop; the handle is then not to be iterated.

        Raises what ended the connection if it is lost; InvalidRequest for a prompt of a wrong type
        or a message over the frame limit.
        """
        return self._submit(prompt, params, _now(), stream, sink, options)

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        began_at: float,
        stream: bool,
        sink: Sink | None,
        options: RequestOptions,
    ) -> Handle:
        """began_at: the event loop's time when the call began, from which its timeout counts."""
        self._connection.check()
        request_id = f"{self._identity.hex}-{self._counter}"
        self._counter += 1
        wire = wire_prompt(prompt)
        message = Generate(
            PROTOCOL_VERSION,
            request_id,
            wire.prompt,
            (params or SamplingParams()).with_seed(),
            stream,
            prompt_token_ids=wire.token_ids,
            **options,
        )
        handle = Handle(message, self._pending.drop, sink)  # it stamps when it was submitted
        self._pending.add(handle)
        if is_time_limit(message.timeout):
            handle.expire_at(began_at + message.timeout)
        return handle

    @overload
    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompt: list[Prompt],
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> list[Completion]: ...
    async def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Completion | list[Completion]:
        """The whole completion of a prompt, or of each of a list of prompts.

        options: see RequestOptions; each prompt of a list has them. All prompts of a list are run
        to their end before the first error is raised.
        """
        began_at = _now()
        await self._connect_within(options.get("timeout"))
        single = not is_list_of_prompts(prompt)
        prompts: list[Any] = [prompt] if single else list(prompt)
        handles: list[Handle] = []
        try:
            for one in prompts:
                handles.append(self._submit(one, params, began_at, False, None, options))
            results = await asyncio.gather(
                *(handle.completion() for handle in handles), return_exceptions=True
            )
        finally:
            for handle in handles:
                handle.abort()
        completions = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            completions.append(result)
        return completions[0] if single else completions

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> AsyncIterator[StreamChunk]:
        """The chunks of a completion as they come. Leaving the loop early aborts the request.

        options: see RequestOptions. Raises InvalidRequest for a list of prompts, as [] is.
        """
        check_is_one_prompt(prompt, "stream")
        began_at = _now()
        await self._connect_within(options.get("timeout"))
        handle = self._submit(prompt, params, began_at, True, None, options)
        try:
            async for chunk in handle:
                yield chunk
        finally:
            handle.abort()

    async def abort(self, request_id: str = "") -> None:
        """End a request of this client; without an id, all of them. They end with "abort"."""
        await self.connect()
        self._pending.abort(request_id)

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Gauges and counters of the server; the question travels the whole ring."""
        info: Info = await self._ask(lambda name: GetInfo(PROTOCOL_VERSION, name), timeout)
        return info.values

    async def flush_cache(self, timeout: float = 10.0) -> int:
        """Forget cached prefixes that nobody uses now. How many pages that freed."""
        info: Info = await self._ask(lambda name: FlushCache(PROTOCOL_VERSION, name), timeout)
        pages = info.values["flushed_pages"]
        assert isinstance(pages, int)
        return pages

    async def tokenize(
        self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS, timeout: float = 60.0
    ) -> list[int]:
        """The token ids of a text or a chat, as generate would have them."""
        check_is_one_prompt(prompt, "tokenize")
        wire = wire_prompt(prompt)
        if wire.token_ids is not None:
            raise InvalidRequest("prompt is a list of token ids already", "prompt")
        answer: Tokens = await self._ask(
            lambda name: Tokenize(PROTOCOL_VERSION, name, wire.prompt, chat), timeout
        )
        return unpack_ids(answer.token_ids).tolist()

    async def detokenize(
        self, token_ids: list[int], skip_special_tokens: bool = True, timeout: float = 60.0
    ) -> str:
        """The text of token ids."""
        packed = wire_prompt(token_ids).token_ids
        if packed is None:
            raise InvalidRequest("token_ids must be a list of integers", "token_ids")
        answer: Text = await self._ask(
            lambda name: Detokenize(PROTOCOL_VERSION, name, packed, skip_special_tokens), timeout
        )
        return answer.text

    async def _ask(self, question: Callable[[str], ClientMessage], timeout: float) -> Any:
        """Send the question that is made with a new name, and wait for its answer.

        timeout: seconds, of which connecting may take a part."""
        name = f"ask-{self._counter}"
        self._counter += 1

        async def connect_and_ask() -> Any:
            await self.connect()
            return await self._pending.ask(name, question(name))

        try:
            return await asyncio.wait_for(connect_and_ask(), timeout)
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"no answer from {self.endpoint} within {timeout} s") from None

    # --- what comes back --------------------------------------------------------------------------

    def _on_message(self, message: ServerMessage) -> None:
        if not isinstance(message, ServerGone):
            self._pending.take(message)
            return
        if message.error.code in (ServerFailed.code, ServerStopping.code):
            self._connection.give_up(message.error)
        self._pending.fail_all(message.error)


def _now() -> float:
    return asyncio.get_running_loop().time()
