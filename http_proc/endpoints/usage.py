"""Token counts in a stream: in the last chunk, or in every chunk, or not at all."""

import asyncio
from typing import Any

import msgspec

from http_proc.protocol.schema import PromptDetails, StreamOptions, UsageBody, usage_body
from quadriga.client.async_client import NO_CHAT_OPTIONS, AsyncClient
from quadriga.client.types import Prompt, StreamChunk
from quadriga.wire.messages.public import ChatOptions, Usage

USAGE = "@usage@"


class UsageInStream:
    """Counts what the chunks of n choices of each prompt have.

    Chunks tell the length of a prompt only at their end. Who wants it in every chunk makes the
    server encode the prompt a second time.
    """

    def __init__(self, options: StreamOptions, n: int) -> None:
        self._n = n
        self._in_every_chunk = options.continuous_usage_stats
        self._at_the_end = options.include_usage or options.continuous_usage_stats
        self._prompt_tokens: list[int] = []
        self._tokens: dict[int, int] = {}
        self._ended: dict[int, Usage] = {}

    @property
    def slot(self) -> dict[str, Any]:
        """The place of the usage in a chunk; none where nobody asked for it."""
        return {"usage": USAGE} if self._at_the_end else {}

    async def count_prompts(
        self, ring: AsyncClient, prompts: list[Prompt], chat: ChatOptions = NO_CHAT_OPTIONS
    ) -> None:
        """Call once all choices have been submitted."""
        if self._in_every_chunk:
            self._prompt_tokens = await asyncio.gather(
                *(_count(ring, prompt, chat) for prompt in prompts)
            )

    def of_chunk(self, choice: int, chunk: StreamChunk) -> bytes:
        """The usage in a chunk as JSON: null unless it is wanted in every one."""
        if chunk.completion is not None:
            self._ended[choice] = chunk.completion.usage
        if not self._in_every_chunk:
            return b"null"
        tokens = self._tokens[choice] = self._tokens.get(choice, 0) + len(chunk.token_ids)
        prompt = self._prompt_tokens[choice // self._n]
        cached = chunk.completion.usage.cached_tokens if chunk.completion else 0
        return msgspec.json.encode(
            UsageBody(prompt, tokens, prompt + tokens, PromptDetails(cached))
        )

    def last(self) -> UsageBody | None:
        """The usage of all choices, where it was asked for."""
        if not self._at_the_end:
            return None
        return usage_body([self._ended[choice] for choice in sorted(self._ended)], self._n)


async def _count(ring: AsyncClient, prompt: Prompt, chat: ChatOptions) -> int:
    """An empty prompt runs as one token."""
    ids = prompt if _is_ids(prompt) else await ring.tokenize(prompt, chat)
    return max(1, len(ids))


def _is_ids(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int))
