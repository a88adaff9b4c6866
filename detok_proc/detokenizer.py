"""What the detokenizer process does, without its sockets: steps of token ids in, chunks out."""

import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from detok_proc.incremental import DecoderFactory, TextDecoder
from detok_proc.stop_strings import StopStrings
from quadriga.messages.ids import pack_ids, unpack_ids
from quadriga.messages.public import Chunk, End, StageTimes, Usage
from quadriga.messages.to_detok import CloseText, OpenText, StepOutput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Deliveries(NamedTuple):
    """by_client: chunks by the client's address. stop_found: requests that the scheduler should
    end, each of them told once."""

    by_client: dict[bytes, list[Chunk]]
    stop_found: list[int]


class Detokenizer:
    """Holds the text state of every open request, and of no other.

    stream_interval: a streaming request is sent its first token at once, then every so many.
    clock: Unix seconds.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stream_interval: int,
        clock: Callable[[], float] = time.time,
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
        for opening in output.opened:
            decoder = self._decoders.make(opening.skip_special_tokens)
            self._streams[opening.seq] = TextStream(opening, decoder)
        deliveries = Deliveries({}, [])
        touched = self._take_tokens(output, deliveries.stop_found)
        for closing in output.closed:
            touched.pop(closing.seq, None)
            self._close(closing, deliveries)
        for stream in touched.values():
            if stream.is_due(self._interval):
                deliveries.by_client.setdefault(stream.client, []).append(stream.take())
        return deliveries

    def _take_tokens(self, output: StepOutput, stop_found: list[int]) -> "dict[int, TextStream]":
        """Push every token; the requests that got one, by their number."""
        silent = _stop_tokens(output) if output.closed else {}
        streams, moment = self._streams, output.time
        touched: dict[int, TextStream] = {}
        for row, (seq, token_id) in enumerate(
            zip(output.seqs, unpack_ids(output.token_ids), strict=True)
        ):
            stream = streams.get(seq)
            if stream is None or stream.matched_stop is not None:
                continue
            stream.push(token_id, moment, silent=silent.get(seq) == (row, token_id))
            touched[seq] = stream
            if stream.matched_stop is not None:
                stop_found.append(seq)
        return touched

    def _close(self, closing: CloseText, deliveries: Deliveries) -> None:
        stream = self._streams.pop(closing.seq, None)
        if stream is None:
            end = _make_end(closing, None, 0, self._clock())
            chunk = Chunk(closing.request_id, 0, "", b"", [], end)
        else:
            stream.flush()
            end = _make_end(closing, stream.matched_stop, stream.tokens, self._clock())
            chunk = stream.take(end)
        deliveries.by_client.setdefault(closing.client, []).append(chunk)


class TextStream:
    """One request between its first token and its end: what is known and not sent yet."""

    __slots__ = ("_decoder", "_ids", "_pieces", "_sent_characters", "_stops", "_times", "client",
                 "matched_stop", "request_id", "streams", "tokens")  # fmt: skip

    def __init__(self, opening: OpenText, decoder: TextDecoder) -> None:
        self.client = opening.client
        self.request_id = opening.request_id
        self.streams = opening.stream
        self.tokens = 0
        self.matched_stop: str | None = None
        self._decoder = decoder
        self._stops = StopStrings(opening.stop_strings) if opening.stop_strings else None
        self._pieces: list[str] = []
        self._ids = array("i")
        self._times: list[float] = []
        self._sent_characters = 0

    def push(self, token_id: int, moment: float, silent: bool) -> None:
        """silent: a stop token, which counts but leaves no text."""
        self.tokens += 1
        self._ids.append(token_id)
        self._times.append(moment)
        if not silent:
            self._add_text(self._decoder.push(token_id))

    def flush(self) -> None:
        """No more tokens come: half characters and half stop strings are text after all."""
        if self.matched_stop is not None:
            return
        self._add_text(self._decoder.flush())
        if self._stops is not None and self.matched_stop is None:
            self._pieces.append(self._stops.flush())

    def is_due(self, interval: int) -> bool:
        """The first token at once, then every `interval` of them."""
        unsent = len(self._ids)
        return self.streams and (unsent >= interval or unsent == self.tokens)

    def take(self, end: End | None = None) -> Chunk:
        """Everything that is known and was not sent."""
        text = "".join(self._pieces)
        ids, times = self._ids, self._times
        chunk = Chunk(self.request_id, self._sent_characters, text, pack_ids(ids), times, end)
        self._sent_characters += len(text)
        self._pieces, self._ids, self._times = [], array("i"), []
        return chunk

    def _add_text(self, text: str) -> None:
        if self._stops is not None:
            text, self.matched_stop = self._stops.push(text)
        if text:
            self._pieces.append(text)


def _stop_tokens(output: StepOutput) -> dict[int, tuple[int, int]]:
    """(row, token id) of the stop token, for each request that ends by one in this step."""
    ending = {c.seq: c.matched_stop for c in output.closed if c.matched_stop is not None}
    last_rows = {seq: row for row, seq in enumerate(output.seqs) if seq in ending}
    return {seq: (row, ending[seq]) for seq, row in last_rows.items()}


def _make_end(closing: CloseText, found: str | None, tokens: int, now: float) -> End:
    """found: the stop string that was met. It tells why the text ends, unless there is an error."""
    stopped = found is not None and closing.error is None
    return End(
        "stop" if stopped else closing.finish_reason,
        Usage(closing.prompt_tokens, tokens, closing.cached_tokens),
        StageTimes(closing.received, closing.tokenized, closing.admitted, closing.first_token, now),
        found if stopped else closing.matched_stop,
        closing.error,
    )
