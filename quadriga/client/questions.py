"""What a client can ask a server beside completions."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from quadriga.client.receipts import Receipt, hash_ids, hash_params
from quadriga.client.session import ServerSession
from quadriga.client.types import (
    NO_CHAT_OPTIONS,
    Completion,
    Prompt,
    RenderedPrompt,
    check_is_one_prompt,
    wire_prompt,
)
from quadriga.errors import InvalidRequest
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.from_client import (
    PROTOCOL_VERSION,
    ChatOptions,
    Detokenize,
    FlushCache,
    Generate,
    GetInfo,
    GetProgress,
    GetTraces,
    Tokenize,
)
from quadriga.wire.messages.live import LiveMessage
from quadriga.wire.messages.to_client import (
    Info,
    ProgressAnswer,
    RequestProgress,
    Text,
    Tokens,
    Traces,
)
from quadriga.wire.messages.trace import RequestTrace


class ServerQuestions(ServerSession):
    """Asks a server for its state, for traces and progress of requests, and for token ids."""

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return gauges and counters of the server, collected from all of its processes.

            num_running = (await client.info())["running"]

        Args:
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            Values by name; docs/protocol.md lists them.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        info: Info = await self._ask(lambda name: GetInfo(PROTOCOL_VERSION, name), timeout)
        return info.values

    async def flush_cache(self, timeout: float = 10.0) -> int:
        """Drop cached prefixes that no request uses; return the number of pages that this freed.

            num_pages = await client.flush_cache()

        Args:
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        info: Info = await self._ask(lambda name: FlushCache(PROTOCOL_VERSION, name), timeout)
        pages = info.values["flushed_pages"]
        assert isinstance(pages, int)
        return pages

    async def progress(
        self, request_ids: list[str], timeout: float = 10.0
    ) -> list[RequestProgress]:
        """Return how far requests of this client are: queued, in prefill, or decoding.

            (progress,) = await client.progress([handle.request_id])

        Args:
            request_ids: `request_id` of handles or chunks, at most 64.
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            A value for each request, in order; its state is UNKNOWN for one that has ended.

        Raises:
            InvalidRequest: there are too many ids.
            QueueFull: too many questions are not answered yet.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer: ProgressAnswer = await self._ask(
            lambda name: GetProgress(PROTOCOL_VERSION, name, request_ids), timeout
        )
        return answer.values

    async def traces(self, request_ids: list[str], timeout: float = 10.0) -> list[RequestTrace]:
        """Return the traces of requests of this client that have ended, as far as they are kept.

            (trace,) = await client.traces([completion.request_id])

        Args:
            request_ids: `request_id` of handles or completions, at most 64.
            timeout: seconds until DeadlineExceeded, connecting included.

        Returns:
            A trace for each choice of each request that was traced.

        Raises:
            InvalidRequest: there are too many ids.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer: Traces = await self._ask(
            lambda name: GetTraces(PROTOCOL_VERSION, name, request_ids), timeout
        )
        return answer.traces

    async def watch(self, replica: int = 0) -> AsyncGenerator[LiveMessage, None]:
        """Yield what the server does: a LiveStep for each step, a LiveServer each second.

        The server makes these messages only while a client watches. A caller that is too slow
        loses messages: the `number` of the next LiveStep has a gap then.

            async for message in client.watch():
                print(message)

        Args:
            replica: number of the replica whose steps are watched, of a server with --dp.

        Raises:
            InvalidRequest: this client may not see the requests of others, or there is no such
                replica.
            QueueFull: too many clients watch.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        await self.connect()
        with self._live.iterator(replica) as iterator:
            while True:
                yield await iterator.next()

    async def tokenize(
        self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS, timeout: float = 60.0
    ) -> list[int]:
        """Return the token ids that `generate` would use for a text or a chat.

            ids = await client.tokenize("Hello, world")

        Args:
            prompt: a text or a chat.
            chat: tools and variables of the chat template, if the prompt is a chat.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: the prompt is neither a text nor a chat, or the model has no chat
                template.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer = await self._tokens("tokenize", prompt, chat, False, timeout)
        return unpack_ids(answer.token_ids).tolist()

    async def render(
        self, prompt: Prompt, chat: ChatOptions = NO_CHAT_OPTIONS, timeout: float = 60.0
    ) -> RenderedPrompt:
        """Return the text and the token ids that `generate` would use for a text or a chat.

            text, ids = await client.render([{"role": "user", "content": "Hello"}])

        Args:
            prompt: a text or a chat.
            chat: tools and variables of the chat template, if the prompt is a chat.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: the prompt is neither a text nor a chat, or the model has no chat
                template, or the template refuses the chat.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        answer = await self._tokens("render", prompt, chat, True, timeout)
        return RenderedPrompt(answer.text, unpack_ids(answer.token_ids).tolist())

    async def add_receipts(self, message: Generate, completions: Sequence[Completion]) -> None:
        """Set the receipt of each choice of a request that has ended.

            await client.add_receipts(handle.message, [await handle.completion()])

        Args:
            message: the request.
            completions: its choices.

        Raises:
            DeadlineExceeded: no answer within the timeouts of `info` and `tokenize`.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        info = await self.info()
        if message.prompt_token_ids is not None:
            ids = unpack_ids(message.prompt_token_ids).tolist()
        else:
            ids = await self.tokenize(msgspec.to_builtins(message.prompt), message.chat)
        for completion in completions:
            completion.receipt = Receipt(
                request_id=completion.request_id,
                model=info["model"],
                fingerprint=info["model_details"]["digest"],
                kernels=info["kernels"] or "",
                seed=(message.params.seed or 0) + completion.index,
                params=hash_params(message.params),
                # The last ones, where the prompt was truncated.
                prompt=hash_ids(ids[-completion.usage.prompt_tokens :]),
                tokens=hash_ids(completion.token_ids),
            )

    async def _tokens(
        self, call: str, prompt: Prompt, chat: ChatOptions, with_text: bool, timeout: float
    ) -> Tokens:
        check_is_one_prompt(prompt, call)
        wire = wire_prompt(prompt)
        if wire.token_ids is not None:
            raise InvalidRequest("prompt is a list of token ids already", "prompt")
        answer: Tokens = await self._ask(
            lambda name: Tokenize(PROTOCOL_VERSION, name, wire.prompt, chat, with_text), timeout
        )
        return answer

    async def detokenize(
        self, token_ids: list[int], skip_special_tokens: bool = True, timeout: float = 60.0
    ) -> str:
        """Return the text of token ids.

            text = await client.detokenize([504, 3575, 282])

        Args:
            token_ids: ids of the model's vocabulary.
            skip_special_tokens: leave special tokens out of the text.
            timeout: seconds until DeadlineExceeded, connecting included.

        Raises:
            InvalidRequest: it is no list of ids, or an id is not in the vocabulary.
            DeadlineExceeded: no answer within the timeout.
            ServerUnreachable: no server answers at the endpoint, or the connection was lost.
        """
        packed = wire_prompt(token_ids).token_ids
        if packed is None:
            raise InvalidRequest("token_ids must be a list of integers", "token_ids")
        answer: Text = await self._ask(
            lambda name: Detokenize(PROTOCOL_VERSION, name, packed, skip_special_tokens), timeout
        )
        return answer.text
