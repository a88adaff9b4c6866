"""Reads a journal back: a beginning of what was written, whatever has become of the file."""

import itertools
import logging
import os
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from quadriga.messages.arrays import unpack_ids
from quadriga.messages.logprobs import LogprobBlock
from quadriga.messages.to_scheduler import Submit
from scheduler_proc.journal_frames import (
    FRAME_HEAD,
    MAGIC,
    NOT_GIVEN_UP,
    TAG_BYTES,
    Accepted,
    Ended,
    Header,
    Round,
    Told,
)
from scheduler_proc.request import Request, Status

BYTES_OF_NUMBER = 4
"""Of a token id or a log-probability."""

_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_round = msgspec.msgpack.Decoder(Round).decode


@dataclass(slots=True)
class Found:
    """A choice of a request, as far as the journal knows it. first_token: Unix seconds."""

    seq: int
    index: int
    message: Submit
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    told: Told = field(default_factory=lambda: Told(-1, [], []))
    first_token: float = 0.0
    ended: Ended | None = None
    settled: bool = False


class Contents(NamedTuple):
    """What a journal holds.

    Attributes:
        header: None where there is no file, or one without a header that can be read.
        found: requests by number, in order; those that are not needed any more are left out.
        num_unread_bytes: after the last frame that is whole and makes sense.
        given_up_by: the `tag` of the run that could not go on with the file, or zeros.
    """

    header: Header | None
    found: list[Found]
    num_unread_bytes: int = 0
    given_up_by: bytes = NOT_GIVEN_UP

    @property
    def num_unfinished(self) -> int:
        return sum(one.ended is None for one in self.found)


class Nonsense(ValueError):
    """A frame is whole, but what it says cannot be."""


def read_journal(path: Path) -> Contents:
    """Read a journal up to its end, or to where it is damaged, which is logged.

    Raises:
        OSError: there is a file, but it cannot be opened.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return Contents(None, [])
    with file:
        return _read(file, path)


def _read(file: BinaryIO, path: Path) -> Contents:
    frames = _Frames(file)
    given_up_by = frames.read_start()
    header: Header | None = None
    found: dict[int, Found] = {}
    for payload in frames:
        try:
            if header is None:
                header = _decode_header(payload)
            else:
                _apply(_decode_round(payload), found, header.vocab_size)
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
            len(found),
        )
    in_order = [found[seq] for seq in sorted(found)]
    return Contents(header, in_order, frames.num_unread_bytes, given_up_by)


class _Frames:
    """The payloads of a file's frames, up to the first one that is damaged.

    Attributes:
        offset: of the first byte that was not read, or not accepted.
        problem: why the file is not read to its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._frame_starts_at = 0
        self.offset = 0
        self.problem = ""

    @property
    def num_unread_bytes(self) -> int:
        return self._size - self.offset

    def reject(self, why: str) -> None:
        """The last frame makes no sense."""
        self.offset, self.problem = self._frame_starts_at, why

    def read_start(self) -> bytes:
        """Return what stands there of the run that gave the file up. Without a start there are no
        frames."""
        start = self._take(len(MAGIC) + TAG_BYTES)
        if len(start) < len(MAGIC) + TAG_BYTES or not start.startswith(MAGIC):
            self.problem = self.problem or "it does not begin as a journal does"
            return NOT_GIVEN_UP
        self.offset = len(start)
        return start[len(MAGIC) :]

    def __iter__(self) -> Iterator[bytes]:
        checksum = 0
        while self.offset and self.num_unread_bytes:
            head = self._take(FRAME_HEAD.size)
            if len(head) < FRAME_HEAD.size:
                self.problem = self.problem or "a frame is cut off"
                return
            length, expected = FRAME_HEAD.unpack(head)
            if length > self.num_unread_bytes - FRAME_HEAD.size:
                self.problem = f"a frame of {length} bytes does not end within the file"
                return
            payload = self._take(length)
            checksum = zlib.crc32(payload, checksum)
            if len(payload) < length or checksum != expected:
                self.problem = self.problem or "a frame's checksum is wrong"
                return
            self._frame_starts_at = self.offset
            self.offset += FRAME_HEAD.size + length
            yield payload

    def _take(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except OSError as error:
            self.problem = str(error)
            return b""


# --- rounds -----------------------------------------------------------------------------------


def _apply(one: Round, found: dict[int, Found], vocab_size: int) -> None:
    """Take in a whole round, or raise ValueError or OverflowError and take in nothing of it."""
    new = _new_requests(one.accepted, found, vocab_size)
    _check(one, found, new, vocab_size)
    found.update(new)
    for step in one.tokens:
        for seq, token in zip(step.seqs, unpack_ids(step.token_ids), strict=True):
            found[seq].tokens.append(token)
            found[seq].first_token = found[seq].first_token or step.time
    for told in one.told:
        found[told.seq].told.tokens += told.tokens
        found[told.seq].told.prompt += told.prompt
    for ended in one.ended:
        found[ended.seq].ended = ended
    for seq in one.settled:
        if seq in found:
            found[seq].settled = True


def _new_requests(
    all_accepted: list[Accepted], found: dict[int, Found], vocab_size: int
) -> dict[int, Found]:
    new: dict[int, Found] = {}
    for accepted in all_accepted:
        _check_message(accepted, vocab_size)
        for index in accepted.indexes:
            seq = accepted.seq + index
            if seq in found or seq in new:
                raise Nonsense(f"request {seq} is accepted twice")
            new[seq] = Found(seq, index, accepted.message)
    return new


def _check_message(accepted: Accepted, vocab_size: int) -> None:
    """See to it that `restored` can make requests of this."""
    message, params = accepted.message, accepted.message.params
    if accepted.seq < 0 or not all(0 <= index < params.n for index in accepted.indexes):
        raise Nonsense(f"request {accepted.seq} has choices {accepted.indexes} of {params.n}")
    if params.max_new_tokens is None or (params.seed is None and params.n > 1):
        raise Nonsense(f"request {accepted.seq} has no max_new_tokens or no seed")
    _check_ids(unpack_ids(message.prompt_ids), vocab_size)
    for word in message.bad_words:
        unpack_ids(word)
    Request.from_submit(accepted.seq, message, frozenset(), params.n - 1)


def _check(one: Round, found: dict[int, Found], new: dict[int, Found], vocab_size: int) -> None:
    """Raise ValueError for a round that cannot follow what was read before."""
    num_tokens: Counter[int] = Counter()
    for step in one.tokens:
        ids = unpack_ids(step.token_ids)
        if len(ids) != len(step.seqs):
            raise Nonsense(f"{len(ids)} tokens are of {len(step.seqs)} requests")
        _check_ids(ids, vocab_size)
        num_tokens.update(step.seqs)
    for seq in (*num_tokens, *(told.seq for told in one.told), *(end.seq for end in one.ended)):
        known = new.get(seq) or found.get(seq)
        if known is None or known.ended is not None:
            raise Nonsense(f"request {seq} is not there, or has ended")
        most = known.message.params.max_new_tokens
        if most is None or len(known.tokens) + num_tokens[seq] > most:
            raise Nonsense(f"request {seq} has more than its {most} tokens")
    for told in one.told:
        for block in (*told.tokens, *told.prompt):
            _check_block(block)


def _check_ids(ids: "array[int]", vocab_size: int) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise Nonsense(f"a token id is not in the vocabulary of {vocab_size}")


def _check_block(block: LogprobBlock) -> None:
    num_top = len(block.values) * block.width
    if len(block.values) % BYTES_OF_NUMBER or not (
        num_top == len(block.top_ids) == len(block.top_values)
    ):
        raise Nonsense("log-probabilities are cut off")


# --- what becomes of it -----------------------------------------------------------------------


def number_anew(found: Iterable[Found]) -> None:
    """Give the requests of another run the numbers from 0 on, those of one message together."""
    next_seq = 0
    for _, choices in itertools.groupby(found, lambda one: one.seq - one.index):
        for choice in choices:
            choice.seq = next_seq + choice.index
            num_choices = choice.message.params.n
        next_seq += num_choices


def restored(found: Found, eos_ids: frozenset[int]) -> Request:
    """The request as the scheduler had it, waiting or ended."""
    request = Request.from_submit(found.seq, found.message, eos_ids, found.index)
    request.tokens += found.tokens
    request.known = len(request.tokens)
    request.first_token = found.first_token
    request.told, request.prompt_logprobs = found.told.tokens, found.told.prompt
    ended = found.ended
    if ended is not None:
        request.status, request.finish_reason = Status.FINISHED, ended.finish_reason
        request.matched_stop, request.error = ended.matched_stop, ended.error
        request.cached_tokens, request.admitted = ended.cached_tokens, ended.admitted
    return request
