"""Token counts and timings in a stream: in the last chunk, in every chunk, or in none."""

from typing import Any

import msgspec

from http_proc.answer.events import AnswerEvent
from http_proc.chat.reasoning_tokens import ReasoningTokens
from http_proc.protocol.schema import PromptDetails, StreamOptions, UsageBody, usage_body
from http_proc.protocol.timings import timings_body
from quadriga.client.types import Completion, StreamChunk

USAGE = "@usage@"


class StreamUsage:
    """Count the tokens of a stream that has `n` choices for each prompt.

    Attributes:
        counts_reasoning: the usage has the tokens of the reasoning.
    """

    def __init__(self, options: StreamOptions, n: int, counts_reasoning: bool = False) -> None:
        self._n = n
        self._in_every_chunk = options.continuous_usage_stats
        self._at_the_end = options.include_usage or options.continuous_usage_stats
        self._num_prompt_tokens: list[int] = []
        self._num_tokens: dict[int, int] = {}
        self._final: dict[int, Completion] = {}
        self.counts_reasoning = counts_reasoning and self._at_the_end
        self._reasoning: dict[int, ReasoningTokens] = {}

    @property
    def slot(self) -> dict[str, Any]:
        """The placeholder of the usage in a chunk; empty if the request asks for no usage."""
        return {"usage": USAGE} if self._at_the_end else {}

    def start(self, num_prompt_tokens: list[int]) -> None:
        """Note the length of each prompt."""
        self._num_prompt_tokens = num_prompt_tokens

    def count_reasoning(self, choice: int, events: list[AnswerEvent], chunk: StreamChunk) -> None:
        """Count the tokens of a chunk whose text has these events."""
        self._reasoning.setdefault(choice, ReasoningTokens()).push(events, len(chunk.token_ids))

    def of_chunk(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the usage in a chunk as JSON: null unless every chunk has one."""
        if chunk.completion is not None:
            self._final[choice] = chunk.completion
        if not self._in_every_chunk:
            return b"null"
        num_tokens = self._num_tokens.get(choice, 0) + len(chunk.token_ids)
        self._num_tokens[choice] = num_tokens
        num_prompt = self._num_prompt_tokens[choice // self._n]
        num_cached = chunk.completion.usage.cached_tokens if chunk.completion else 0
        return msgspec.json.encode(
            UsageBody(num_prompt, num_tokens, num_prompt + num_tokens, PromptDetails(num_cached))
        )

    def total(self) -> dict[str, Any]:
        """Return usage and timings of all choices; empty if the request asks for no usage."""
        if not self._at_the_end:
            return {}
        completions = [self._final[choice] for choice in sorted(self._final)]
        usage = usage_body([completion.usage for completion in completions], self._n)
        counts = [self._reasoning[choice] for choice in sorted(self._reasoning)]
        usage = usage.with_reasoning([each.count if each.is_exact else None for each in counts])
        return {"usage": usage, "timings": timings_body(completions)}

    def at_end_of(self, choice: int) -> dict[str, Any]:
        """Return the timings of a choice for its last chunk, unless a chunk with usage follows."""
        return {} if self._at_the_end else {"timings": timings_body([self._final[choice]])}
