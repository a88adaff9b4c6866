"""The core of the detokenizer process, without sockets: steps of token ids in, chunks out."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from detok_proc.incremental import DecoderFactory
from detok_proc.logprobs import iterate_blocks, logprobs_by_row
from detok_proc.stop_regexes import RequestBudget
from detok_proc.text_stream import TextStream, make_chunk
from quadriga.clock import now
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.to_client import End, ErrorInfo, PlainChunk, StageTimes, Usage
from quadriga.wire.messages.to_detok import StepOutput, StreamEnd, StreamReplay, StreamStart
from quadriga.wire.messages.to_scheduler import CLIENT_LOST

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
        lost: ends that no client gets: the requests were aborted because their clients were lost.
    """

    by_client: ChunksByClient
    stop_found: list[int]
    replays: ChunksByClient
    ended: list[int]
    lost: ChunksByClient


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
        deliveries = Deliveries({}, [], {}, [], {})
        for replay in output.replayed:  # its searches are not charged twice
            self._budgets.pop((replay.opening.client, replay.opening.request_id), None)
        for replay in output.replayed:
            self._replay(replay, output.time, deliveries)
        for opening in output.opened:
            self._open(opening)
        touched = self._push_tokens(output, deliveries.stop_found)
        for closing in output.closed:
            touched.pop(closing.seq, None)
            self._close(closing, deliveries.by_client, deliveries)
        for stream in touched.values():
            if stream.is_due(self._interval):
                deliveries.by_client.setdefault(stream.client, []).append(stream.take())
        return deliveries

    def forget_all(self) -> None:
        """Drop every text, which a new scheduler does not know."""
        self._streams.clear()

    def forget(self, seqs: Iterable[int]) -> None:
        """Drop the texts of these requests, which go on elsewhere."""
        for seq in seqs:
            self._streams.pop(seq, None)

    def _open(self, opening: StreamStart) -> TextStream:
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
            self._close(closing, deliveries.replays, deliveries)
            return
        if stream.is_over:
            deliveries.stop_found.append(replay.opening.seq)
        chunk = stream.take() if stream.is_streamed else stream.empty_chunk()
        deliveries.replays.setdefault(stream.client, []).append(chunk)

    def _push_tokens(self, output: StepOutput, stop_found: list[int]) -> dict[int, TextStream]:
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

    def _close(self, closing: StreamEnd, by_client: ChunksByClient, deliveries: Deliveries) -> None:
        """End a stream: `by_client` gets its last chunk, unless its client was lost."""
        stream = self._streams.pop(closing.seq, None)
        if stream is None:
            end = _make_end(closing, self._clock())
            chunk = make_chunk(closing.request_id, closing.index, end)
        else:
            stream.flush()
            end = _make_end(
                closing, self._clock(), stream.num_tokens, stream.matched_stop, stream.error
            )
            chunk = stream.take(end)
        if closing.error is not None and closing.error.code == CLIENT_LOST:
            by_client = deliveries.lost
        by_client.setdefault(closing.client, []).append(chunk)
        deliveries.ended.append(closing.seq)


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
