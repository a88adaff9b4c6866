"""What the detokenizer process does, without its sockets: steps of token ids in, chunks out."""

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from detok_proc.incremental import DecoderFactory
from detok_proc.logprobs import (
    Entry,
    LogprobCollector,
    entries_by_row,
    entries_of,
    prompt_logprobs_entries,
)
from detok_proc.stop_regexes import TookTooLong
from detok_proc.stop_strings import StopStrings
from quadriga.clock import now
from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.public import Chunk, End, ErrorInfo, PlainChunk, StageTimes, Usage
from quadriga.wire.messages.to_detok import StepOutput, StreamEnd, StreamReplay, StreamStart

if TYPE_CHECKING:
    from tokenizers import Tokenizer


ByClient = dict[bytes, list[PlainChunk]]
"""Chunks by the client's address."""


class Deliveries(NamedTuple):
    """again: chunks that tell their requests from the first token on, to go first. stop_found:
    requests that the scheduler should end, each of them told once. ended: those whose end is among
    the chunks."""

    by_client: ByClient
    stop_found: list[int]
    again: ByClient
    ended: list[int]


class Detokenizer:
    """Holds the text state of every open request, and of no other.

    stream_interval: a streaming request is sent its first token at once, then every so many.
    clock: Unix seconds.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stream_interval: int,
        clock: Callable[[], float] = now,
    ) -> None:
        self._decoders = DecoderFactory(tokenizer)
        self._interval = stream_interval
        self._clock = clock
        self._streams: dict[int, TextStream] = {}

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    def process(self, output: StepOutput) -> Deliveries:
        """Take in one step: what it opened, its tokens, then what it closed."""
        deliveries = Deliveries({}, [], {}, [])
        for replay in output.replayed:
            self._replay(replay, output.time, deliveries)
        for opening in output.opened:
            self._streams[opening.seq] = TextStream(opening, self._decoders)
        touched = self._take_tokens(output, deliveries.stop_found)
        for closing in output.closed:
            touched.pop(closing.seq, None)
            self._close(closing, deliveries.by_client, deliveries.ended)
        for stream in touched.values():
            if stream.is_due(self._interval):
                deliveries.by_client.setdefault(stream.client, []).append(stream.take())
        return deliveries

    def forget_all(self) -> None:
        """Another scheduler knows nothing of these texts."""
        self._streams.clear()

    def _replay(self, replay: StreamReplay, moment: float, deliveries: Deliveries) -> None:
        """Take in a request as if it had just given all its tokens."""
        seq, closing = replay.opening.seq, replay.closing
        stream = self._streams[seq] = TextStream(replay.opening, self._decoders)
        ids, entries = unpack_ids(replay.token_ids), entries_of(replay.logprobs)
        stop = closing.matched_stop if closing is not None else None
        for place, token_id in enumerate(ids, start=1):
            if not stream.is_over:
                is_stop = place == len(ids) and token_id == stop
                stream.push(token_id, moment, is_stop, next(entries, None))
        if closing is not None:
            self._close(closing, deliveries.again, deliveries.ended)
        elif stream.is_over:
            deliveries.stop_found.append(seq)
        if closing is None:
            chunk = stream.take() if stream.streams else stream.nothing()
            deliveries.again.setdefault(stream.client, []).append(chunk)

    def _take_tokens(self, output: StepOutput, stop_found: list[int]) -> "dict[int, TextStream]":
        """Push every token; the requests that got one, by their number."""
        silent = _stop_tokens(output) if output.closed else {}
        told = entries_by_row(output.logprobs)
        streams, moment = self._streams, output.time
        touched: dict[int, TextStream] = {}
        for row, (seq, token_id) in enumerate(
            zip(output.seqs, unpack_ids(output.token_ids), strict=True)
        ):
            stream = streams.get(seq)
            if stream is None or stream.is_over:
                continue
            stream.push(token_id, moment, silent.get(seq) == (row, token_id), told.get(row))
            touched[seq] = stream
            if stream.is_over:
                stop_found.append(seq)
        return touched

    def _close(self, closing: StreamEnd, by_client: ByClient, ended: list[int]) -> None:
        stream = self._streams.pop(closing.seq, None)
        if stream is None:
            end = _make_end(closing, None, None, 0, self._clock())
            chunk = _empty_chunk(closing, end)
        else:
            stream.flush()
            end = _make_end(
                closing, stream.matched_stop, stream.error, stream.tokens, self._clock()
            )
            chunk = stream.take(end)
        by_client.setdefault(closing.client, []).append(chunk)
        ended.append(closing.seq)


class TextStream:
    """One request between its first token and its end: what is known and not sent yet.

    matched_stop: what ended the text; error: why it cannot go on.
    """

    __slots__ = ("_decoder", "_ids", "_index", "_keeps_stop", "_min_tokens", "_pieces", "_prompt",
                 "_sent_characters", "_stops", "_times", "_told", "client", "error",
                 "matched_stop", "request_id", "streams", "tokens")  # fmt: skip

    def __init__(self, opening: StreamStart, decoders: DecoderFactory) -> None:
        self.client = opening.client
        self.request_id = opening.request_id
        self.streams = opening.stream
        self.tokens = 0
        self.matched_stop: str | None = None
        self.error: ErrorInfo | None = None
        self._index = opening.index
        self._decoder = decoders.make(opening.skip_special_tokens)
        self._keeps_stop = opening.keeps_stop
        self._min_tokens = opening.min_new_tokens
        self._stops: StopStrings | None = None
        if opening.stop_strings or opening.stop_regexes:
            strings, regexes = opening.stop_strings, opening.stop_regexes
            self._stops = StopStrings(strings, regexes, opening.keeps_stop)
        told, prompt = opening.logprobs, opening.prompt
        self._told = None if told is None else LogprobCollector(told, decoders.bytes_of)
        self._prompt = (
            None if prompt is None else prompt_logprobs_entries(prompt, decoders.bytes_of)
        )
        self._pieces: list[str] = []
        self._ids = array("i")
        self._times: list[float] = []
        self._sent_characters = 0

    @property
    def is_over(self) -> bool:
        """The scheduler is to end it."""
        return self.matched_stop is not None or self.error is not None

    def push(self, token_id: int, moment: float, is_stop: bool, entry: Entry | None) -> None:
        """is_stop: a stop token, which counts but leaves no text, unless its request keeps it."""
        self.tokens += 1
        self._ids.append(token_id)
        self._times.append(moment)
        if self._told is not None and entry is not None:
            self._told.add(token_id, entry)
        if not is_stop or self._keeps_stop:
            self._add_text(self._decoder.push(token_id))

    def flush(self) -> None:
        """No more tokens come: half characters and half stop strings are text after all."""
        if self.is_over:
            return
        self._add_text(self._decoder.flush())
        if self._stops is not None and not self.is_over:
            self._pieces.append(self._stops.flush())

    def is_due(self, interval: int) -> bool:
        """The first token at once, then every `interval` of them."""
        unsent = len(self._ids)
        return self.streams and (unsent >= interval or unsent == self.tokens)

    def nothing(self) -> PlainChunk:
        """A chunk that says no more than that the request is known."""
        if self._index == 0:
            return PlainChunk(self.request_id, 0, "", b"", [])
        return Chunk(self.request_id, 0, "", b"", [], None, self._index)

    def take(self, end: End | None = None) -> PlainChunk:
        """Everything that is known and was not sent."""
        text = "".join(self._pieces)
        ids, times, offset = pack_ids(self._ids), self._times, self._sent_characters
        self._sent_characters += len(text)
        self._pieces, self._ids, self._times = [], array("i"), []
        if self._told is None and self._prompt is None and self._index == 0:
            return PlainChunk(self.request_id, offset, text, ids, times, end)
        told = None if self._told is None else self._told.take()
        prompt, self._prompt = self._prompt, None
        return Chunk(self.request_id, offset, text, ids, times, end, self._index, told, prompt)

    def _add_text(self, text: str) -> None:
        if self._stops is not None and self.tokens > self._min_tokens:
            try:
                text, self.matched_stop = self._stops.push(text)
            except TookTooLong as error:
                self.error = ErrorInfo("invalid_request", str(error), "stop_regex")
        if text:
            self._pieces.append(text)


def _empty_chunk(closing: StreamEnd, end: End) -> PlainChunk:
    """The end of a request that never gave a token."""
    if closing.index == 0:
        return PlainChunk(closing.request_id, 0, "", b"", [], end)
    return Chunk(closing.request_id, 0, "", b"", [], end, closing.index)


def _stop_tokens(output: StepOutput) -> dict[int, tuple[int, int]]:
    """(row, token id) of the stop token, for each request that ends by one in this step."""
    ending = {c.seq: c.matched_stop for c in output.closed if c.matched_stop is not None}
    last_rows = {seq: row for row, seq in enumerate(output.seqs) if seq in ending}
    return {seq: (row, ending[seq]) for seq, row in last_rows.items()}


def _make_end(
    closing: StreamEnd, found: str | None, failed: ErrorInfo | None, tokens: int, now: float
) -> End:
    """found: the stop string that was met; failed: why its text could not go on. They tell why the
    text ends, unless the scheduler knows of an error."""
    error = closing.error or failed
    stopped = found is not None and error is None
    reason = "error" if failed is not None else closing.finish_reason
    return End(
        "stop" if stopped else reason,
        Usage(closing.prompt_tokens, tokens, closing.cached_tokens),
        StageTimes(
            closing.received_at,
            closing.tokenized_at,
            closing.admitted_at,
            closing.first_token_at,
            now,
        ),
        found if stopped else closing.matched_stop,
        error,
    )
