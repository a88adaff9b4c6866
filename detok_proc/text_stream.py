"""The text of one choice between its first token and its end."""

from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from detok_proc.incremental import DecoderFactory
from detok_proc.logprobs import (
    NAN,
    LogprobCollector,
    PromptLogprobCollector,
    TokenLogprobs,
    iterate_blocks,
)
from detok_proc.stops import RequestBudget, SearchTooSlow, StopStrings
from quadriga.wire.client import Chunk, End, ErrorInfo
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.to_detok import StreamEnd, StreamReplay, StreamStart

# Given tokens that are pushed as one piece of work.
GIVEN_AT_ONCE = 32
NO_LOGPROBS = TokenLogprobs(NAN, array("i"), array("f"))


class Token(NamedTuple):
    """A token of a stream.

    Attributes:
        time: Unix seconds; 0.0 of a token that was given, and that no step has sampled.
        is_stop: it ended the request.
        logprobs: None where its client wants none.
    """

    token_id: int
    time: float
    is_stop: bool
    logprobs: TokenLogprobs | None


class TextStream:
    """The text of one choice between its first token and its end: what was not sent yet.

    Attributes:
        is_streamed: its client wants text before the end.
        num_tokens: tokens that were pushed.
        matched_stop: the stop string or expression that ended the text.
        error: why the text cannot go on.
        seq: the scheduler's number.
        is_told: the scheduler knows that the text is over.
        is_slow: a token of it may take long.
        is_replay: the next chunk has everything from the first token on.
        may_send: the given tokens, those of a replay, and the logprobs of the prompt are all taken.
        closing: its end, for when its waiting tokens are pushed.
    """

    __slots__ = (
        "_decoder", "_given", "_ids", "_index", "_keeps_stop", "_lengths", "_logprobs",
        "_min_tokens", "_num_given_pushed", "_num_sent_chars", "_pieces", "_prompt_logprobs",
        "_replayed", "_stops", "_times", "_waiting", "client", "closing", "error", "is_replay",
        "is_slow", "is_streamed", "is_told", "matched_stop", "may_send", "num_tokens",
        "request_id", "seq",
    )  # fmt: skip

    def __init__(
        self, opening: StreamStart, decoders: DecoderFactory, budget: RequestBudget | None
    ) -> None:
        self.seq = opening.seq
        self.client = opening.client
        self.request_id = opening.request_id
        self.is_streamed = opening.stream
        self.num_tokens = 0
        self.matched_stop: str | None = None
        self.error: ErrorInfo | None = None
        self._index = opening.index
        prompt_end = unpack_ids(opening.prompt_end)
        self._decoder = decoders.make(opening.skip_special_tokens, prompt_end)
        self._keeps_stop = opening.keeps_stop
        self._min_tokens = opening.min_new_tokens
        self._stops: StopStrings | None = None
        if opening.stop_strings or opening.stop_regexes:
            self._stops = StopStrings(
                opening.stop_strings, opening.stop_regexes, opening.keeps_stop, budget
            )
        bytes_of, width, prompt = decoders.bytes_of, opening.logprobs, opening.prompt
        self._logprobs = None if width is None else LogprobCollector(width, bytes_of)
        self._prompt_logprobs = (
            None if prompt is None else PromptLogprobCollector(prompt, bytes_of)
        )  # fmt: skip
        self.is_slow = bool(opening.stop_regexes) or prompt is not None
        self._given = unpack_ids(opening.given_ids)
        self._num_given_pushed = 0
        self._replayed: Iterator[Token] = iter(())
        has_more = prompt is not None or len(self._given) > 0
        self.is_replay, self.may_send, self.is_told = False, not has_more, False
        self.closing: StreamEnd | None = None
        self._waiting: deque[Token] = deque()
        # Of each token that was not sent, if the client asks for them.
        self._lengths: list[int] | None = [] if opening.text_lengths else None
        self._pieces: list[str] = []
        self._ids = array("i")
        self._times: list[float] = []
        self._num_sent_chars = 0

    @property
    def is_over(self) -> bool:
        """Whether the text has ended, so that the scheduler should end the request."""
        return self.matched_stop is not None or self.error is not None

    # --- tokens that wait -------------------------------------------------------------------------

    def replay(self, replay: StreamReplay, time: float) -> None:
        """Take the tokens of a replay, to be pushed by `advance`."""
        closing = replay.closing
        ids, logprobs = unpack_ids(replay.token_ids), iterate_blocks(replay.logprobs)
        last, stop_id = len(ids), None if closing is None else closing.matched_stop
        del self._given[len(ids) :]  # no token was sampled, and none was sent
        num_given = len(self._given)
        self._replayed = (
            Token(token_id, time, position == last and token_id == stop_id, next(logprobs, None))
            for position, token_id in enumerate(ids[num_given:], start=num_given + 1)
        )
        self.closing = closing
        self.begin_replay()

    def begin_replay(self) -> None:
        """Send the next chunk as a replay, once `advance` has taken what comes before."""
        self.is_replay, self.may_send = True, False

    def wait(self, token: Token) -> None:
        """Take a token, to be pushed by `advance` after those before it."""
        self._waiting.append(token)

    def advance(self) -> bool:
        """Do a small piece of the work that waits. Return False once there is none."""
        if self.is_over:
            self.may_send = True
            self._waiting.clear()
            return False
        if not self.may_send:
            if self._prompt_logprobs is not None and self._prompt_logprobs.advance():
                return True
            if self._num_given_pushed < len(self._given):
                self._push_given()
                return True
            token = next(self._replayed, None)
            if token is not None:
                self.push(*token)
                return True
            self.may_send = True
        if not self._waiting:
            return False
        self.push(*self._waiting.popleft())
        return True

    @property
    def has_work(self) -> bool:
        """Whether there is work for `advance`."""
        return bool(self._waiting) or not self.may_send

    # --- text -------------------------------------------------------------------------------------

    def push(
        self, token_id: int, time: float, is_stop: bool, logprobs: TokenLogprobs | None
    ) -> None:
        """Append a token. The text of a stop token is dropped, unless the request keeps it."""
        self.num_tokens += 1
        self._ids.append(token_id)
        self._times.append(time)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.add(token_id, logprobs)
        num_pieces = len(self._pieces)
        if not is_stop or self._keeps_stop:
            self._add_text(self._decoder.push(token_id))
        if self._lengths is not None:
            self._lengths.append(sum(map(len, self._pieces[num_pieces:])))

    def _push_given(self) -> None:
        """Append some of the tokens with which the text begins, and which no step has sampled."""
        first = self._num_given_pushed
        ids = self._given[first : first + GIVEN_AT_ONCE]
        self._num_given_pushed += len(ids)
        if self._stops is None and self._logprobs is None:
            self.num_tokens += len(ids)
            self._ids += ids
            self._times += [0.0] * len(ids)
            texts = list(map(self._decoder.push, ids))
            self._pieces.append("".join(texts))
            if self._lengths is not None:
                self._lengths += map(len, texts)
            return
        for token_id in ids:
            self.push(token_id, 0.0, False, NO_LOGPROBS)
            if self.is_over:
                return

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

    def empty_chunk(self) -> Chunk:
        """Return a chunk that only confirms the request."""
        return Chunk(self.request_id, 0, "", b"", [], None, self._index)

    def take(self, end: End | None = None, vector: bytes | None = None) -> Chunk:
        """Return a chunk of everything that was not sent. vector: of a request for one."""
        text = "".join(self._pieces)
        ids, times, offset = pack_ids(self._ids), self._times, self._num_sent_chars
        self._num_sent_chars += len(text)
        lengths = self._take_lengths(end)
        self._pieces, self._ids, self._times = [], array("i"), []
        logprobs = None if self._logprobs is None else self._logprobs.take()
        collector, self._prompt_logprobs = self._prompt_logprobs, None
        prompt = None if collector is None else collector.take()
        return Chunk(
            self.request_id, offset, text, ids, times, end, self._index, logprobs, prompt, lengths,
            vector,
        )  # fmt: skip

    def _take_lengths(self, end: End | None) -> list[int] | None:
        """Return the text lengths of the tokens that were not sent, where they say anything."""
        if self._lengths is None:
            return None
        lengths, self._lengths = self._lengths, []
        return None if len(lengths) == 1 and end is None else lengths

    def _add_text(self, text: str) -> None:
        if self._stops is not None and self.num_tokens > self._min_tokens:
            try:
                text, self.matched_stop = self._stops.push(text)
            except SearchTooSlow as error:
                self.error = ErrorInfo("invalid_request", str(error), "stop_regex")
                text = ""  # it was not searched, and follows text that is held back
        if text:
            self._pieces.append(text)
