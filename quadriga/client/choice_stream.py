"""One choice of a request under way: what has come of it so far."""

from quadriga.client.logprobs import TokenLogprob, read_logprobs, read_prompt_logprobs
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.public import Chunk, End


class GapFound(Exception):
    """Something between this chunk and the one before never came."""


class ToldOtherwise(Exception):
    """What is told again is not what was told before."""


class ChoiceStream:
    """Collects chunks. submitted: Unix seconds.

    The server may tell a choice again from its beginning, perhaps with less than has come of it
    already: `_told_tokens` and `_told_characters` say where the telling is.
    """

    def __init__(self, request_id: str, index: int, submitted: float) -> None:
        self._request_id = request_id
        self._index = index
        self._texts: list[str] = []
        self._characters = 0
        self._token_ids: list[int] = []
        self._told_tokens = 0
        self._told_characters = 0
        self._timings = Timings(submitted=submitted)
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None

    def tell_again(self) -> None:
        """The chunks that come now begin with the first token."""
        self._told_tokens = self._told_characters = 0

    def take(self, chunk: Chunk, received_at: float) -> StreamChunk | None:
        """What a chunk says that is new; None where that is nothing. Raises GapFound, with nothing
        changed, and ToldOtherwise."""
        ids = unpack_ids(chunk.token_ids).tolist()
        self._check_follows(chunk, len(ids))
        known_ids = min(len(self._token_ids) - self._told_tokens, len(ids))
        if ids[:known_ids] != self._token_ids[self._told_tokens :][:known_ids]:
            raise ToldOtherwise
        text = chunk.text[self._characters - self._told_characters :]
        self._told_tokens += len(ids)
        self._told_characters += len(chunk.text)
        item = StreamChunk(
            self._request_id, text, ids[known_ids:], chunk.token_times[known_ids:], received_at,
            index=self._index,
        )  # fmt: skip
        self._keep(item)
        self._take_logprobs(chunk, ids, item)
        if chunk.end:
            item.completion = self._finish(chunk.end, received_at)
        says_something = text or item.token_ids or item.prompt_logprobs or chunk.end
        return item if says_something else None

    def _check_follows(self, chunk: Chunk, count: int) -> None:
        tokens = chunk.end.usage.completion_tokens if chunk.end else 0
        if chunk.text_offset != self._told_characters or tokens > self._told_tokens + count:
            raise GapFound

    def _keep(self, item: StreamChunk) -> None:
        self._texts.append(item.text)
        self._characters += len(item.text)
        self._token_ids += item.token_ids
        self._timings.token_times += item.token_times

    def _take_logprobs(self, chunk: Chunk, ids: list[int], item: StreamChunk) -> None:
        if chunk.logprobs is not None:
            told = read_logprobs(ids, chunk.logprobs)
            item.logprobs = told[len(ids) - len(item.token_ids) :]
            self._logprobs = [*(self._logprobs or ()), *item.logprobs]
        if chunk.prompt_logprobs is not None and self._prompt_logprobs is None:
            item.prompt_logprobs = read_prompt_logprobs(chunk.prompt_logprobs)
            self._prompt_logprobs = item.prompt_logprobs

    def _finish(self, end: End, received_at: float) -> Completion:
        timings, times = self._timings, end.times
        timings.received, timings.tokenized = times.received, times.tokenized
        timings.admitted, timings.first_token = times.admitted, times.first_token
        timings.detokenized, timings.delivered = times.detokenized, received_at
        timings.reconcile()
        return Completion(
            request_id=self._request_id,
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=end.finish_reason,
            usage=end.usage,
            timings=timings,
            matched_stop=end.matched_stop,
            index=self._index,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )
