"""The text and tokens of one choice that have arrived so far."""

from quadriga.client.logprobs import TokenLogprob, read_logprobs, read_prompt_logprobs
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.to_client import Chunk, End


class ChunkGap(Exception):
    """A chunk before this one is missing."""


class ReplayMismatch(Exception):
    """A replay differs from what was received before."""


class ChoiceStream:
    """Collects the chunks of a choice.

    The server may replay a choice from its start, perhaps with less than has arrived already.
    `_num_sent_tokens` and `_num_sent_chars` are the position of the server's current pass.

    Args:
        request_id: id of the request.
        index: index of the choice.
        submitted_at: Unix time of the submission.
    """

    def __init__(self, request_id: str, index: int, submitted_at: float) -> None:
        self._request_id = request_id
        self._index = index
        self._texts: list[str] = []
        self._num_chars = 0
        self._token_ids: list[int] = []
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._timings = Timings(submitted=submitted_at)
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None

    def restart(self) -> None:
        """Expect a replay: the next chunk starts with the first token."""
        self._num_sent_tokens = self._num_sent_chars = 0

    def take(self, chunk: Chunk, received_at: float) -> StreamChunk | None:
        """Return what is new in a chunk; None if nothing is.

        Raises:
            ChunkGap: a chunk is missing; this object is unchanged.
            ReplayMismatch: a replay has other tokens than before.
        """
        ids = unpack_ids(chunk.token_ids).tolist()
        self._check_follows(chunk, len(ids))
        num_known = min(len(self._token_ids) - self._num_sent_tokens, len(ids))
        if ids[:num_known] != self._token_ids[self._num_sent_tokens :][:num_known]:
            raise ReplayMismatch
        text = chunk.text[self._num_chars - self._num_sent_chars :]
        self._num_sent_tokens += len(ids)
        self._num_sent_chars += len(chunk.text)
        item = StreamChunk(
            self._request_id, text, ids[num_known:], chunk.token_times[num_known:], received_at,
            index=self._index,
        )  # fmt: skip
        if chunk.text_lengths is not None:
            item.text_lengths = chunk.text_lengths[num_known:]
        self._keep(item)
        self._take_logprobs(chunk, ids, item)
        if chunk.end:
            item.completion = self._finish(chunk.end, received_at)
        is_new = text or item.token_ids or item.prompt_logprobs or chunk.end
        return item if is_new else None

    def _check_follows(self, chunk: Chunk, num_ids: int) -> None:
        tokens = chunk.end.usage.completion_tokens if chunk.end else 0
        if chunk.text_offset != self._num_sent_chars or tokens > self._num_sent_tokens + num_ids:
            raise ChunkGap

    def _keep(self, item: StreamChunk) -> None:
        self._texts.append(item.text)
        self._num_chars += len(item.text)
        self._token_ids += item.token_ids
        self._timings.token_times += item.token_times

    def _take_logprobs(self, chunk: Chunk, ids: list[int], item: StreamChunk) -> None:
        if chunk.logprobs is not None:
            logprobs = read_logprobs(ids, chunk.logprobs)
            item.logprobs = logprobs[len(ids) - len(item.token_ids) :]
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
