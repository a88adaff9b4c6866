"""The core of the detokenizer process, without sockets: steps of token ids in, chunks out."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from detok_proc.incremental import DecoderFactory
from detok_proc.logprobs import logprobs_by_row
from detok_proc.stops import RequestBudget
from detok_proc.text_stream import TextStream, Token
from quadriga.clock import now
from quadriga.wire.client import Chunk, End, ErrorInfo, StageTimes, Usage
from quadriga.wire.packing import unpack_ids
from quadriga.wire.to_detok import StepOutput, StreamEnd, StreamStart
from quadriga.wire.to_scheduler import CLIENT_LOST

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# Others wait for so long at most, and a little more where a single token takes long.
SLICE_S = 0.01
# Of a request, before the next one has its turn.
TURN_S = 0.001
# Tokens that are pushed between two looks at the clock.
PIECES_PER_LOOK = 16

ChunksByClient = dict[bytes, list[Chunk]]


class Deliveries(NamedTuple):
    """What follows from one step.

    Attributes:
        by_client: chunks by the client's address.
        stop_found: numbers of the requests that the scheduler should end; each is named once.
        replays: chunks that start a text from its first token on; they are sent first.
        ended: placements of the choices whose end is among the chunks, by their numbers.
        lost: ends that no client gets: the requests were aborted because their clients were lost.
        placements: of the choices that end, as in Submit, by client, id and index.
    """

    by_client: ChunksByClient
    stop_found: list[int]
    replays: ChunksByClient
    ended: dict[int, int]
    lost: ChunksByClient
    placements: dict[tuple[bytes, str, int], int]

    @classmethod
    def empty(cls) -> "Deliveries":
        """Return deliveries of nothing."""
        return cls({}, [], {}, {}, {}, {})


class Detokenizer:
    """Hold the text state of every open request, and of no other.

    What may take long is done in slices, in which requests have turns: the history of one request
    delays no other for longer than a slice. That are replays, prompts with logprobs, and all tokens
    of requests with stop expressions.

    Args:
        tokenizer: for the ids.
        stream_interval: number of tokens between two chunks of a streamed request, after the
            first, which is sent at once.
        clock: returns Unix seconds.
        slice_s: length of a slice.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stream_interval: int,
        clock: Callable[[], float] = now,
        slice_s: float = SLICE_S,
    ) -> None:
        self._decoders = DecoderFactory(tokenizer)
        self._interval = stream_interval
        self._clock = clock
        self._slice_s = slice_s
        self._streams: dict[int, TextStream] = {}
        self._budgets: WeakValueDictionary[tuple[bytes, str], RequestBudget] = WeakValueDictionary()
        # The streams with work, by request: the first one is next.
        self._backlog: OrderedDict[tuple[bytes, str], dict[int, TextStream]] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Number of open requests, each choice counted."""
        return len(self._streams)

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._backlog)

    @property
    def has_ends(self) -> bool:
        """Whether requests have ended whose last tokens wait."""
        streams = chain.from_iterable(streams.values() for streams in self._backlog.values())
        return any(stream.closing is not None for stream in streams)

    def process(self, output: StepOutput) -> Deliveries:
        """Take in one step: its replays, new requests, tokens and ends, in this order.

        A slice of what may take long is done, too.
        """
        deliveries = Deliveries.empty()
        for replay in output.replayed:  # its searches are not charged twice
            self._budgets.pop((replay.opening.client, replay.opening.request_id), None)
        for replay in output.replayed:
            self._open(replay.opening).replay(replay, output.time)
            self._enlist(self._streams[replay.opening.seq])
        for opening in output.opened:
            earlier = self._streams.get(opening.seq)
            begun = self._open(opening)
            if earlier is not None and earlier.is_replay:  # of no token, and not sent yet
                begun.begin_replay()
                self._enlist(begun)
        touched = self._push_tokens(output, deliveries.stop_found)
        for closing in output.closed:
            touched.pop(closing.seq, None)
            stream = self._streams.get(closing.seq)
            if stream is not None and stream.has_work:
                stream.closing = closing
                self._enlist(stream)
            else:
                self._close(closing, deliveries.by_client, deliveries)
        for stream in touched.values():
            if stream.is_due(self._interval):
                deliveries.by_client.setdefault(stream.client, []).append(stream.take())
        self._work(deliveries)
        return deliveries

    def work(self) -> Deliveries:
        """Do a slice of what may take long."""
        deliveries = Deliveries.empty()
        self._work(deliveries)
        return deliveries

    def forget_all(self) -> None:
        """Drop every text, which a new scheduler does not know."""
        self._streams.clear()
        self._backlog.clear()

    def forget(self, seqs: Iterable[int]) -> None:
        """Drop the texts of these requests: they go on elsewhere, or their replays follow."""
        for seq in seqs:
            stream = self._streams.pop(seq, None)
            if stream is not None:
                self._delist(stream)

    def _open(self, opening: StreamStart) -> TextStream:
        budget = None
        if opening.stop_regexes:
            name = (opening.client, opening.request_id)
            budget = self._budgets.setdefault(name, RequestBudget())
        self.forget([opening.seq])
        stream = self._streams[opening.seq] = TextStream(opening, self._decoders, budget)
        return stream

    # --- work in slices ---------------------------------------------------------------------------

    def _enlist(self, stream: TextStream) -> None:
        """Give a stream turns until its work is done."""
        name = (stream.client, stream.request_id)
        self._backlog.setdefault(name, {})[stream.seq] = stream

    def _delist(self, stream: TextStream) -> None:
        name = (stream.client, stream.request_id)
        streams = self._backlog.get(name, {})
        streams.pop(stream.seq, None)
        if not streams:
            self._backlog.pop(name, None)

    def _work(self, deliveries: Deliveries) -> None:
        """Let requests have turns until the slice is over, or nothing is left."""
        ends_at = time.perf_counter() + self._slice_s
        touched: dict[int, TextStream] = {}
        while self._backlog:
            name, streams = self._backlog.popitem(last=False)
            stream = next(iter(streams.values()))
            touched[stream.seq] = stream
            if not self._advance(stream, min(ends_at, time.perf_counter() + TURN_S)):
                del streams[stream.seq], touched[stream.seq]
                self._settle(stream, deliveries)
            if streams:
                self._backlog[name] = streams
            if time.perf_counter() >= ends_at:
                break
        for stream in touched.values():
            self._settle(stream, deliveries)

    def _advance(self, stream: TextStream, ends_at: float) -> bool:
        """Work on a stream until a time. Return whether work is left."""
        pieces = 1 if stream.is_slow else PIECES_PER_LOOK
        while True:
            for _ in range(pieces):
                if not stream.advance():
                    return False
            if time.perf_counter() >= ends_at:
                return stream.has_work

    def _settle(self, stream: TextStream, deliveries: Deliveries) -> None:
        """Deliver what a stream has after a turn."""
        if not stream.may_send or self._streams.get(stream.seq) is not stream:
            return
        target = deliveries.replays if stream.is_replay else deliveries.by_client
        if stream.closing is not None and not stream.has_work:
            self._close(stream.closing, target, deliveries)
            return
        if stream.is_over and not stream.is_told:
            stream.is_told = True
            deliveries.stop_found.append(stream.seq)
        if stream.is_replay:
            chunk = stream.take() if stream.is_streamed else stream.empty_chunk()
            stream.is_replay = False
        elif stream.is_due(self._interval):
            chunk = stream.take()
        else:
            return
        target.setdefault(stream.client, []).append(chunk)

    # --- steps ------------------------------------------------------------------------------------

    def _push_tokens(self, output: StepOutput, stop_found: list[int]) -> dict[int, TextStream]:
        """Push every token of a step. Return the requests that got one, by number.

        A token waits where its stream has work, or may take long.
        """
        stop_tokens = _stop_tokens(output) if output.closed else {}
        logprobs = logprobs_by_row(output.logprobs)
        streams, at = self._streams, output.time
        touched: dict[int, TextStream] = {}
        for row, (seq, token_id) in enumerate(
            zip(output.seqs, unpack_ids(output.token_ids), strict=True)
        ):
            stream = streams.get(seq)
            if stream is None or stream.is_over:
                continue
            is_stop = stop_tokens.get(seq) == (row, token_id)
            if stream.is_slow or stream.has_work:
                stream.wait(Token(token_id, at, is_stop, logprobs.get(row)))
                self._enlist(stream)
                continue
            stream.push(token_id, at, is_stop, logprobs.get(row))
            touched[seq] = stream
            if stream.is_over:
                stream.is_told = True
                stop_found.append(seq)
        return touched

    def _close(self, closing: StreamEnd, by_client: ChunksByClient, deliveries: Deliveries) -> None:
        """End a stream: `by_client` gets its last chunk, unless its client was lost."""
        stream = self._streams.pop(closing.seq, None)
        if stream is None:
            end = _make_end(closing, self._clock())
            chunk = Chunk(
                closing.request_id, 0, "", b"", [], end, closing.index, vector=closing.vector
            )
        else:
            stream.flush()
            end = _make_end(
                closing, self._clock(), stream.num_tokens, stream.matched_stop, stream.error
            )
            chunk = stream.take(end, closing.vector)
        if closing.error is not None and closing.error.code == CLIENT_LOST:
            by_client = deliveries.lost
        by_client.setdefault(closing.client, []).append(chunk)
        deliveries.ended[closing.seq] = closing.placement
        name = (closing.client, closing.request_id, closing.index)
        deliveries.placements[name] = closing.placement


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
