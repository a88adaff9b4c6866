"""The core of the detokenizer process, without sockets: steps of token ids in, chunks out."""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from detok_proc.incremental import DecoderFactory
from detok_proc.logprobs import (
    LogprobCollector,
    TokenLogprobs,
    iterate_blocks,
    logprobs_by_row,
    prompt_logprobs,
)
from detok_proc.stop_regexes import RequestBudget, SearchTooSlow
from detok_proc.stop_strings import StopStrings
from quadriga.clock import now
from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.public import Chunk, End, ErrorInfo, PlainChunk, StageTimes, Usage
from quadriga.wire.messages.to_detok import StepOutput, StreamEnd, StreamReplay, StreamStart

if TYPE_CHECKING:
    from tokenizers import Tokenizer


ChunksByClient = dict[bytes, list[PlainChunk]]


class Deliveries(NamedTuple):
    """What follows from one step.

    Attributes:
        by_client: chunks by the client's address.
        stop_found: numbers of the requests that the scheduler should end; each is named once.
        replays: chunks that start a text from its first token on; they are sent first.
        ended: numbers of the requests whose end is among the chunks.
    """

    by_client: ChunksByClient
    stop_found: list[int]
    replays: ChunksByClient
    ended: list[int]


class Detokenizer:
    """Hold the text state of every open request, and of no other.

    Args:
        tokenizer: for the ids.
        stream_interval: a streamed request gets its first token at once, then every so many.
        clock: returns Unix seconds.
    """

    def __init__(
        self, tokenizer: "Tokenizer", stream_interval: int, clock: Callable[[], float] = now
    ) -> None:
        self._decoders = DecoderFactory(tokenizer)
        self._interval = stream_interval
        self._clock = clock
        self._streams: dict[int, TextStream] = {}
        self._budgets: WeakValueDictionary[tuple[bytes, str], RequestBudget] = WeakValueDictionary()

    @property
    def num_open(self) -> int:
        """Number of open requests, each choice counted."""
        return len(self._streams)

    def process(self, output: StepOutput) -> Deliveries:
        """Take in one step: its replays, new requests, tokens and ends, in this order."""
        deliveries = Deliveries({}, [], {}, [])
        for replay in output.replayed:  # its searches are not charged twice
            self._budgets.pop((replay.opening.client, replay.opening.request_id), None)
        for replay in output.replayed:
            self._replay(replay, output.time, deliveries)
        for opening in output.opened:
            self._open(opening)
        touched = self._push_tokens(output, deliveries.stop_found)
        for closing in output.closed:
            touched.pop(closing.seq, None)
            self._close(closing, deliveries.by_client, deliveries.ended)
        for stream in touched.values():
            if stream.is_due(self._interval):
                deliveries.by_client.setdefault(stream.client, []).append(stream.take())
        return deliveries

    def forget_all(self) -> None:
        """Drop every text, which a new scheduler does not know."""
        self._streams.clear()

    def _open(self, opening: StreamStart) -> "TextStream":
        budget = None
        if opening.stop_regexes:
            name = (opening.client, opening.request_id)
            budget = self._budgets.setdefault(name, RequestBudget())
        stream = self._streams[opening.seq] = TextStream(opening, self._decoders, budget)
        return stream

    def _replay(self, replay: StreamReplay, time: float, deliveries: Deliveries) -> None:
        """Take in all tokens of a request as if they had been generated in this step."""
        closing = replay.closing
        stream = self._open(replay.opening)
        ids, logprobs = unpack_ids(replay.token_ids), iterate_blocks(replay.logprobs)
        stop_id = closing.matched_stop if closing is not None else None
        for position, token_id in enumerate(ids, start=1):
            if not stream.is_over:
                is_stop = position == len(ids) and token_id == stop_id
                stream.push(token_id, time, is_stop, next(logprobs, None))
        if closing is not None:
            self._close(closing, deliveries.replays, deliveries.ended)
            return
        if stream.is_over:
            deliveries.stop_found.append(replay.opening.seq)
        chunk = stream.take() if stream.is_streamed else stream.empty_chunk()
        deliveries.replays.setdefault(stream.client, []).append(chunk)

    def _push_tokens(self, output: StepOutput, stop_found: list[int]) -> "dict[int, TextStream]":
        """Push every token of a step. Return the requests that got one, by number."""
        stop_tokens = _stop_tokens(output) if output.closed else {}
        logprobs = logprobs_by_row(output.logprobs)
        streams, time = self._streams, output.time
        touched: dict[int, TextStream] = {}
        for row, (seq, token_id) in enumerate(
            zip(output.seqs, unpack_ids(output.token_ids), strict=True)
        ):
            stream = streams.get(seq)
            if stream is None or stream.is_over:
                continue
            stream.push(token_id, time, stop_tokens.get(seq) == (row, token_id), logprobs.get(row))
            touched[seq] = stream
            if stream.is_over:
                stop_found.append(seq)
        return touched

    def _close(self, closing: StreamEnd, by_client: ChunksByClient, ended: list[int]) -> None:
        stream = self._streams.pop(closing.seq, None)
        if stream is None:
            end = _make_end(closing, self._clock())
            chunk = _make_chunk(closing.request_id, closing.index, end)
        else:
            stream.flush()
            end = _make_end(
                closing, self._clock(), stream.num_tokens, stream.matched_stop, stream.error
            )
            chunk = stream.take(end)
        by_client.setdefault(closing.client, []).append(chunk)
        ended.append(closing.seq)


class TextStream:
    """The text of one choice between its first token and its end: what was not sent yet.

    Attributes:
        is_streamed: its client wants text before the end.
        num_tokens: tokens that were pushed.
        matched_stop: the stop string or expression that ended the text.
        error: why the text cannot go on.
    """

    __slots__ = (
        "_decoder", "_ids", "_index", "_keeps_stop", "_logprobs", "_min_tokens", "_num_sent_chars",
        "_pieces", "_prompt_logprobs", "_stops", "_times", "client", "error", "is_streamed",
        "matched_stop", "num_tokens", "request_id",
    )  # fmt: skip

    def __init__(
        self, opening: StreamStart, decoders: DecoderFactory, budget: RequestBudget | None
    ) -> None:
        self.client = opening.client
        self.request_id = opening.request_id
        self.is_streamed = opening.stream
        self.num_tokens = 0
        self.matched_stop: str | None = None
        self.error: ErrorInfo | None = None
        self._index = opening.index
        self._decoder = decoders.make(opening.skip_special_tokens)
        self._keeps_stop = opening.keeps_stop
        self._min_tokens = opening.min_new_tokens
        self._stops: StopStrings | None = None
        if opening.stop_strings or opening.stop_regexes:
            self._stops = StopStrings(
                opening.stop_strings, opening.stop_regexes, opening.keeps_stop, budget
            )
        bytes_of, width, prompt = decoders.bytes_of, opening.logprobs, opening.prompt
        self._logprobs = None if width is None else LogprobCollector(width, bytes_of)
        self._prompt_logprobs = None if prompt is None else prompt_logprobs(prompt, bytes_of)
        self._pieces: list[str] = []
        self._ids = array("i")
        self._times: list[float] = []
        self._num_sent_chars = 0

    @property
    def is_over(self) -> bool:
        """Whether the text has ended, so that the scheduler should end the request."""
        return self.matched_stop is not None or self.error is not None

    def push(
        self, token_id: int, time: float, is_stop: bool, logprobs: TokenLogprobs | None
    ) -> None:
        """Append a token. The text of a stop token is dropped, unless the request keeps it."""
        self.num_tokens += 1
        self._ids.append(token_id)
        self._times.append(time)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.add(token_id, logprobs)
        if not is_stop or self._keeps_stop:
            self._add_text(self._decoder.push(token_id))

    def flush(self) -> None:
        """Append what was held back, as no more tokens come: half characters, half stop strings."""
        if self.is_over:
            return
        self._add_text(self._decoder.flush())
        if self._stops is not None and not self.is_over:
            self._pieces.append(self._stops.flush())

    def is_due(self, interval: int) -> bool:
        """Return whether a chunk is to be sent: the first token at once, then every `interval`."""
        num_unsent = len(self._ids)
        return self.is_streamed and (num_unsent >= interval or num_unsent == self.num_tokens)

    def empty_chunk(self) -> PlainChunk:
        """Return a chunk that only confirms the request."""
        return _make_chunk(self.request_id, self._index)

    def take(self, end: End | None = None) -> PlainChunk:
        """Return a chunk of everything that was not sent."""
        text = "".join(self._pieces)
        ids, times, offset = pack_ids(self._ids), self._times, self._num_sent_chars
        self._num_sent_chars += len(text)
        self._pieces, self._ids, self._times = [], array("i"), []
        if self._logprobs is None and self._prompt_logprobs is None and self._index == 0:
            return PlainChunk(self.request_id, offset, text, ids, times, end)
        logprobs = None if self._logprobs is None else self._logprobs.take()
        prompt, self._prompt_logprobs = self._prompt_logprobs, None
        return Chunk(self.request_id, offset, text, ids, times, end, self._index, logprobs, prompt)

    def _add_text(self, text: str) -> None:
        if self._stops is not None and self.num_tokens > self._min_tokens:
            try:
                text, self.matched_stop = self._stops.push(text)
            except SearchTooSlow as error:
                self.error = ErrorInfo("invalid_request", str(error), "stop_regex")
        if text:
            self._pieces.append(text)


def _make_chunk(request_id: str, index: int, end: End | None = None) -> PlainChunk:
    """Return a chunk without tokens."""
    if index == 0:
        return PlainChunk(request_id, 0, "", b"", [], end)
    return Chunk(request_id, 0, "", b"", [], end, index)


def _stop_tokens(output: StepOutput) -> dict[int, tuple[int, int]]:
    """Return (row, token id) of the stop token of each request that one ends in this step."""
    stop_ids = {c.seq: c.matched_stop for c in output.closed if c.matched_stop is not None}
    last_rows = {seq: row for row, seq in enumerate(output.seqs) if seq in stop_ids}
    return {seq: (row, stop_ids[seq]) for seq, row in last_rows.items()}


def _make_end(
    closing: StreamEnd,
    now: float,
    num_tokens: int = 0,
    matched_stop: str | None = None,
    text_error: ErrorInfo | None = None,
) -> End:
    """Return the end of a choice. An error of the scheduler goes before what ended the text."""
    error = closing.error or text_error
    is_stopped = matched_stop is not None and error is None
    reason = "error" if text_error is not None else closing.finish_reason
    return End(
        "stop" if is_stopped else reason,
        Usage(closing.prompt_tokens, num_tokens, closing.cached_tokens),
        StageTimes(
            closing.received_at,
            closing.tokenized_at,
            closing.admitted_at,
            closing.first_token_at,
            now,
        ),
        matched_stop if is_stopped else closing.matched_stop,
        error,
    )
