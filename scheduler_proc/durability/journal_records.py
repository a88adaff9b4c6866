"""The format of the journal's file, and how it is read.

| bytes | content |
|---|---|
| 8 | MAGIC, which holds the version of the format |
| 8 | zeros; the `run_tag` of its writer once that has given the file up |
| … | frames: length and checksum of the payload (uint32 little-endian), then the payload |

The checksum of a frame is the CRC-32 of its payload, started with the checksum of the frame before,
so that a missing, repeated or moved frame is noticed like a damaged one. Payloads are msgpack:
first a JournalHeader, then JournalRecords.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from quadriga.wire.messages.logprobs import LogprobBlock
from quadriga.wire.messages.to_client import ErrorInfo
from quadriga.wire.messages.to_scheduler import Submit
from scheduler_proc.state.request import Request

MAGIC = b"QDRJRNL2"
TAG_BYTES = 8
NOT_GIVEN_UP = bytes(TAG_BYTES)
FRAME_HEAD = struct.Struct("<II")
SUBMIT_TAG = str(Submit.__struct_config__.tag)

_encode = msgspec.msgpack.Encoder().encode
_decode_submit = msgspec.msgpack.Decoder(Submit).decode


class JournalHeader(msgspec.Struct, array_like=True, frozen=True):
    """The run that wrote the file, and its model: requests cannot go on with another model.

    Attributes:
        model: name that the user gave.
        fingerprint: hash of the model's files.
    """

    run: str
    model: str
    fingerprint: str
    vocab_size: int
    context_length: int


class AcceptedRecord(msgspec.Struct, array_like=True):
    """A request that was accepted.

    Attributes:
        seq: number of choice 0; choice i has seq + i.
        message: the Submit, encoded without the fields behind the last one that says something.
        indexes: its choices that the journal has.
    """

    seq: int
    message: msgspec.Raw
    indexes: list[int]

    @classmethod
    def of(cls, seq: int, message: Submit, indexes: list[int]) -> "AcceptedRecord":
        """Return the record of a message that was submitted."""
        return cls(seq, msgspec.Raw(_encode(_written(message))), indexes)

    def submit(self) -> Submit:
        """Return the message. Raise msgspec.DecodeError if it is none."""
        return _decode_submit(self.message)


def _written(message: Submit) -> tuple[object, ...]:
    """Return the fields that the journal has of a message, behind its tag.

    These are those of a request without a tenant, a prefix of its own and a trace; of one that
    begins; or all of them.
    """
    fields = message.__struct_fields__
    if not (message.progress or message.placement):
        has_tenant = message.tenant or message.cache_salt or message.trace
        fields = fields[: fields.index("progress" if has_tenant else "tenant")]
    elif message.sender:
        message = msgspec.structs.replace(message, since=0, sender=0)
    return (SUBMIT_TAG, *(getattr(message, name) for name in fields))


class TokenRecord(msgspec.Struct, array_like=True):
    """The tokens of a step, as in StepOutput."""

    seqs: list[int]
    token_ids: bytes
    time: float


class LogprobRecord(msgspec.Struct, array_like=True):
    """Logprobs of a request: of generated tokens, a block each, and of its prompt."""

    seq: int
    tokens: list[LogprobBlock] = []
    prompt: list[LogprobBlock] = []


class Ended(msgspec.Struct, array_like=True):
    """How a request ended, as in StreamEnd."""

    seq: int
    finish_reason: str
    matched_stop: int | None
    error: ErrorInfo | None
    cached_tokens: int
    admitted_at: float


class JournalRecord(msgspec.Struct, array_like=True):
    """What happened in one step of the scheduler, in the order of the fields.

    Attributes:
        acknowledged: numbers of ended requests whose clients have their ends.
        kernels: what computes the tokens of this record and of those after it, as in WorkerReady;
            "": as before.
    """

    accepted: list[AcceptedRecord] = []
    tokens: list[TokenRecord] = []
    logprobs: list[LogprobRecord] = []
    ended: list[Ended] = []
    acknowledged: list[int] = []
    kernels: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(getattr(self, name) for name in self.__struct_fields__)


def ended_record(request: Request) -> Ended:
    """Return how a request ended."""
    assert request.finish_reason is not None
    return Ended(
        request.seq,
        request.finish_reason.value,
        request.matched_stop,
        request.error,
        request.cached_tokens,
        request.admitted_at,
    )


def run_tag(run: str) -> bytes:
    """Return the mark in a file that this run has given up."""
    return hashlib.sha256(run.encode()).digest()[:TAG_BYTES]


def make_frame(payload: bytes, previous_checksum: int) -> tuple[bytes, int]:
    """Return the frame of a payload, and its checksum. The first frame has a previous one of 0."""
    checksum = zlib.crc32(payload, previous_checksum)
    return FRAME_HEAD.pack(len(payload), checksum) + payload, checksum


class FrameReader:
    """Read the payloads of a file's frames, up to the first damaged one.

    Attributes:
        offset: position of the first byte that was not read, or not accepted.
        problem: why the file is not read to its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._frame_offset = 0
        self.offset = 0
        self.problem = ""

    @property
    def num_unread_bytes(self) -> int:
        """Number of bytes from the offset to the end of the file."""
        return self._size - self.offset

    def reject(self, why: str) -> None:
        """Count the last frame as unread: its content makes no sense."""
        self.offset, self.problem = self._frame_offset, why

    def read_start(self) -> bytes:
        """Return the tag of the run that gave the file up. Without a start there are no frames."""
        start = self._read(len(MAGIC) + TAG_BYTES)
        if len(start) < len(MAGIC) + TAG_BYTES or not start.startswith(MAGIC):
            self.problem = self.problem or "it does not begin as a journal does"
            return NOT_GIVEN_UP
        self.offset = len(start)
        return start[len(MAGIC) :]

    def __iter__(self) -> Iterator[bytes]:
        checksum = 0
        while self.offset and self.num_unread_bytes:
            head = self._read(FRAME_HEAD.size)
            if len(head) < FRAME_HEAD.size:
                self.problem = self.problem or "a frame is cut off"
                return
            length, expected = FRAME_HEAD.unpack(head)
            if length > self.num_unread_bytes - FRAME_HEAD.size:
                self.problem = f"a frame of {length} bytes does not end within the file"
                return
            payload = self._read(length)
            checksum = zlib.crc32(payload, checksum)
            if len(payload) < length or checksum != expected:
                self.problem = self.problem or "a frame's checksum is wrong"
                return
            self._frame_offset = self.offset
            self.offset += FRAME_HEAD.size + length
            yield payload

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except OSError as error:
            self.problem = str(error)
            return b""
