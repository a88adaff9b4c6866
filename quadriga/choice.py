"""One choice of a request under way: what has come of it so far."""

from quadriga.completion import Completion, StreamChunk, Timings
from quadriga.logprobs import TokenLogprob, read_logprobs, read_prompt_logprobs
from quadriga.messages.ids import unpack_ids
from quadriga.messages.public import Chunk, End


class Choice:
    """Collects chunks. submitted: Unix seconds."""

    def __init__(self, request_id: str, index: int, submitted: float) -> None:
        self._request_id = request_id
        self._index = index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._timings = Timings(submitted=submitted)
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None

    def take(self, chunk: Chunk, received_at: float) -> StreamChunk:
        """What a chunk says."""
        token_ids = unpack_ids(chunk.token_ids).tolist()
        self._texts.append(chunk.text)
        self._token_ids += token_ids
        self._timings.token_times += chunk.token_times
        item = StreamChunk(
            self._request_id, chunk.text, token_ids, chunk.token_times, received_at,
            index=self._index,
        )  # fmt: skip
        self._take_logprobs(chunk, item)
        if chunk.end:
            item.completion = self._finish(chunk.end, received_at)
        return item

    def _take_logprobs(self, chunk: Chunk, item: StreamChunk) -> None:
        if chunk.logprobs is not None:
            item.logprobs = read_logprobs(item.token_ids, chunk.logprobs)
            self._logprobs = [*(self._logprobs or ()), *item.logprobs]
        if chunk.prompt_logprobs is not None:
            item.prompt_logprobs = read_prompt_logprobs(chunk.prompt_logprobs)
            self._prompt_logprobs = item.prompt_logprobs

    def _finish(self, end: End, received_at: float) -> Completion:
        timings, times = self._timings, end.times
        timings.received, timings.tokenized = times.received, times.tokenized
        timings.admitted, timings.first_token = times.admitted, times.first_token
        timings.detokenized, timings.delivered = times.detokenized, received_at
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
