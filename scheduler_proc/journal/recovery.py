"""Read a journal back: the requests that its records describe.

What is read is a beginning of what was written, whatever has become of the file: reading ends at
the first frame that is damaged or makes no sense. A record counts whole, or not at all.
"""

import itertools
import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from quadriga import disk
from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.packing import unpack_ids
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.journal.file import (
    NOT_GIVEN_UP,
    AcceptedRecord,
    Ended,
    FrameReader,
    JournalHeader,
    JournalRecord,
    LogprobRecord,
)
from scheduler_proc.state.request import FinishReason, Request

NUMBER_BYTES = 4  # size of a token id or a logprob

_decode_header = msgspec.msgpack.Decoder(JournalHeader).decode
_decode_record = msgspec.msgpack.Decoder(JournalRecord).decode


@dataclass(slots=True)
class RecoveredRequest:
    """A choice of a request, as far as the journal has it.

    Attributes:
        tokens: of the answer, with those that were given.
        first_token_at, last_token_at: Unix seconds; 0.0 without a token.
        acknowledged: whether the client has the end.
        kernels: what computed the tokens; several, with "; " between them, after a change; "":
            unknown.
    """

    seq: int
    index: int
    message: Submit
    max_new_tokens: int
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: LogprobRecord = field(default_factory=lambda: LogprobRecord(-1, [], []))
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ended: Ended | None = None
    acknowledged: bool = False
    kernels: str = ""

    @property
    def vector(self) -> bytes:
        """Float32 bytes of the log-probabilities that a request for them has as its answer."""
        if self.message.params.pooling is None:
            return b""
        return b"".join(block.values for block in self.logprobs.prompt)


class JournalContents(NamedTuple):
    """What was read of a journal.

    Attributes:
        header: None where there is no file, or none with a readable header.
        requests: requests in the order of their numbers, as far as they are still needed.
        num_unread_bytes: bytes after the last frame that is whole and makes sense.
        given_up_by: the `run_tag` of the run that has given the file up, or zeros.
    """

    header: JournalHeader | None
    requests: list[RecoveredRequest]
    num_unread_bytes: int = 0
    given_up_by: bytes = NOT_GIVEN_UP

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return sum(request.ended is None for request in self.requests)


def read_journal(path: Path) -> JournalContents:
    """Read a journal up to its end, or to where it is damaged, which is logged.

    Raises:
        OSError: there is a file, but it cannot be opened.
    """
    try:
        file = os.fdopen(disk.open_regular(path), "rb")
    except FileNotFoundError:
        return JournalContents(None, [])
    with file:
        return _read(file, path)


def _read(file: BinaryIO, path: Path) -> JournalContents:
    frames = FrameReader(file)
    given_up_by = frames.read_start()
    header: JournalHeader | None = None
    state = JournalState(0)
    for payload in frames:
        try:
            if header is None:
                header = _decode_header(payload)
                state = JournalState(header.vocab_size)
            else:
                state.apply(_decode_record(payload))
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            frames.reject(str(error))
            break
    if frames.num_unread_bytes:
        logging.warning(
            "the journal %s is damaged at byte %d (%s): %d bytes are not read, %d requests were",
            path,
            frames.offset,
            frames.problem,
            frames.num_unread_bytes,
            len(state.requests),
        )
    in_order = [state.requests[seq] for seq in sorted(state.requests)]
    return JournalContents(header, in_order, frames.num_unread_bytes, given_up_by)


class InvalidRecord(ValueError):
    """A record is whole, but contradicts itself or the records before it."""


class JournalState:
    """The requests of the records applied so far.

    Attributes:
        requests: choices of requests, by number.
    """

    def __init__(self, vocab_size: int) -> None:
        self.requests: dict[int, RecoveredRequest] = {}
        self._vocab_size = vocab_size
        self._open: set[int] = set()
        self._growing: set[int] = set()
        self._kernels = ""

    def apply(self, record: JournalRecord) -> None:
        """Apply a record.

        Raises:
            ValueError, OverflowError: the record makes no sense; nothing of it was applied.
        """
        new = self._new_requests(record.accepted)
        self._check(record, new)
        self._kernels = record.kernels or self._kernels
        requests = self.requests
        requests.update(new)
        self._open.update(new)
        self._growing.update(new)
        for step in record.tokens:
            for seq, token in zip(step.seqs, unpack_ids(step.token_ids), strict=True):
                request = requests[seq]
                request.tokens.append(token)
                if request.kernels != self._kernels:
                    self._change_kernels(request)
                request.first_token_at = request.first_token_at or step.time
                request.last_token_at = step.time
                if len(request.tokens) == request.max_new_tokens:
                    self._growing.discard(seq)
        for logprobs in record.logprobs:
            self._take_logprobs(requests[logprobs.seq], logprobs)
        for ended in record.ended:
            requests[ended.seq].ended = ended
            self._open.discard(ended.seq)
            self._growing.discard(ended.seq)
        for seq in record.acknowledged:
            if seq not in requests:
                continue
            request = requests[seq]
            request.acknowledged = True
            if request.message.params.pooling is not None and not request.vector:
                del requests[seq]  # its vector is not kept: sent again, it is computed again

    def _take_logprobs(self, request: RecoveredRequest, logprobs: LogprobRecord) -> None:
        request.logprobs.tokens += logprobs.tokens
        request.logprobs.prompt += logprobs.prompt
        if request.vector and request.kernels != self._kernels:
            self._change_kernels(request)

    def _change_kernels(self, request: RecoveredRequest) -> None:
        known = [name for name in (request.kernels, self._kernels) if name]
        if not request.kernels.endswith(self._kernels):
            request.kernels = "; ".join(known)

    def _new_requests(self, all_accepted: list[AcceptedRecord]) -> dict[int, RecoveredRequest]:
        new: dict[int, RecoveredRequest] = {}
        for accepted in all_accepted:
            message = accepted.submit()
            max_new_tokens = _check_message(accepted, message, self._vocab_size)
            for index in accepted.indexes:
                seq = accepted.seq + index
                if seq in self.requests or seq in new:
                    raise InvalidRecord(f"request {seq} is accepted twice")
                given = array("i", message.params.first_token_ids)
                new[seq] = RecoveredRequest(seq, index, message.begun(), max_new_tokens, given)
            for choice in message.progress:
                request = new.get(accepted.seq + choice.index)
                if request is not None:
                    request.tokens = unpack_ids(choice.token_ids) or request.tokens
                    request.first_token_at = choice.first_token_at
                    request.logprobs = LogprobRecord(
                        -1, list(choice.logprobs), list(choice.prompt_logprobs)
                    )
        return new

    def _check(self, record: JournalRecord, new: dict[int, RecoveredRequest]) -> None:
        """Raise ValueError for a record that cannot follow the records before it."""
        for step in record.tokens:
            ids = unpack_ids(step.token_ids)
            if len(ids) != len(step.seqs):
                raise InvalidRecord(f"{len(ids)} tokens are of {len(step.seqs)} requests")
            _check_ids(ids, self._vocab_size)
            if not self._growing.issuperset(step.seqs):
                _expect(step.seqs, self._growing, new)
        seqs = list(itertools.chain.from_iterable(step.seqs for step in record.tokens))
        if len(set(seqs)) < len(seqs):  # seldom: one token each is never too many
            self._check_room(Counter(seqs), new)
        _expect((logprobs.seq for logprobs in record.logprobs), self._open, new)
        _expect((ended.seq for ended in record.ended), self._open, new)
        for ended in record.ended:
            FinishReason(ended.finish_reason)
        for logprobs in record.logprobs:
            for block in (*logprobs.tokens, *logprobs.prompt):
                _check_block(block)

    def _check_room(self, counts: dict[int, int], new: dict[int, RecoveredRequest]) -> None:
        for seq, count in counts.items():
            request = new.get(seq) or self.requests[seq]
            if len(request.tokens) + count > request.max_new_tokens:
                raise InvalidRecord(f"request {seq} has more than {request.max_new_tokens} tokens")


def _expect(seqs: Iterable[int], known: set[int], new: dict[int, RecoveredRequest]) -> None:
    for seq in seqs:
        if seq not in known and seq not in new:
            raise InvalidRecord(f"request {seq} is unknown, or has ended")


def _check_message(accepted: AcceptedRecord, message: Submit, vocab_size: int) -> int:
    """Check that `restored` can make requests of a message. Return its max_new_tokens."""
    params = message.params
    if accepted.seq < 0 or not all(0 <= index < params.n for index in accepted.indexes):
        raise InvalidRecord(f"request {accepted.seq} has choices {accepted.indexes} of {params.n}")
    max_new_tokens = params.max_new_tokens
    if max_new_tokens is None or max_new_tokens < 1 or (params.seed is None and params.n > 1):
        raise InvalidRecord(f"request {accepted.seq} has no max_new_tokens or no seed")
    if not message.weight > 0:
        raise InvalidRecord(f"request {accepted.seq} has a weight of {message.weight}")
    _check_ids(unpack_ids(message.prompt_ids), vocab_size)
    _check_ids(array("i", params.first_token_ids), vocab_size)
    if len(params.first_token_ids) >= max_new_tokens:
        raise InvalidRecord(f"request {accepted.seq} begins with all of its tokens")
    for choice in message.progress:
        ids = unpack_ids(choice.token_ids)
        _check_ids(ids, vocab_size)
        if len(ids) > max_new_tokens:
            raise InvalidRecord(f"request {accepted.seq} begins with {len(ids)} tokens")
        for block in (*choice.logprobs, *choice.prompt_logprobs):
            _check_block(block)
    for word in message.bad_words:
        unpack_ids(word)
    Request.from_submit(accepted.seq, message, frozenset(), params.n - 1)
    return max_new_tokens


def _check_ids(ids: "array[int]", vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InvalidRecord(f"a token id is not in the vocabulary of {vocab_size}")


def _check_block(block: LogprobBlock) -> None:
    num_top = len(block.values) * block.width
    if len(block.values) % NUMBER_BYTES or not (
        num_top == len(block.top_ids) == len(block.top_values)
    ):
        raise InvalidRecord("logprobs are cut off")


# --- requests for the scheduler ---------------------------------------------------------------


def renumber(requests: Iterable[RecoveredRequest]) -> None:
    """Number the requests of an earlier run from 0 on, choices of one message in a row.

    The placements of that run are over.
    """
    next_seq = 0
    for _, choices in itertools.groupby(requests, lambda request: request.seq - request.index):
        for choice in choices:
            choice.seq = next_seq + choice.index
            if choice.message.placement:
                choice.message = msgspec.structs.replace(choice.message, placement=0)
            num_choices = choice.message.params.n
        next_seq += num_choices


def restored(recovered: RecoveredRequest, eos_ids: frozenset[int]) -> Request:
    """Return a request as the earlier scheduler had it, waiting or ended."""
    request = Request.from_submit(recovered.seq, recovered.message, eos_ids, recovered.index)
    request.tokens[request.num_prompt :] = recovered.tokens
    request.num_known_tokens = len(request.tokens)
    request.first_token_at = recovered.first_token_at
    request.logprobs = recovered.logprobs.tokens
    request.prompt_logprobs = [] if recovered.vector else recovered.logprobs.prompt
    ended = recovered.ended
    if ended is not None:
        request.finish(FinishReason(ended.finish_reason), ended.matched_stop, ended.error)
        request.vector = recovered.vector or None
        request.cached_tokens, request.admitted_at = ended.cached_tokens, ended.admitted_at
    return request
