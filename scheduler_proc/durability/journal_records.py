"""The format of the journal's file.

| bytes | content |
|---|---|
| 8 | MAGIC, which has the format's version |
| 8 | zeros; once its writer has given the file up, that run's `tag` |
| … | frames: of the payload the length and the checksum, uint32 little-endian, then the payload |

The checksum of a frame is the CRC-32 of its payload, started with the checksum of the frame before,
so that a frame that is missing, repeated or moved is noticed like a damaged one. Payloads are
msgpack: first a JournalHeader, then JournalRecords.
"""

import hashlib
import struct
import zlib

import msgspec

from quadriga.wire.messages.logprobs import LogprobBlock
from quadriga.wire.messages.public import ErrorInfo
from quadriga.wire.messages.to_scheduler import Submit
from scheduler_proc.state.request import Request

MAGIC = b"QDRJRNL2"
TAG_BYTES = 8
NOT_GIVEN_UP = bytes(TAG_BYTES)
FRAME_HEAD = struct.Struct("<II")


class JournalHeader(msgspec.Struct, array_like=True, frozen=True):
    """The run that wrote the file, and its model: requests cannot go on with another one.

    Attributes:
        model: name that the user gave.
        fingerprint: of the model's files.
    """

    run: str
    model: str
    fingerprint: str
    vocab_size: int
    context_length: int


class Accepted(msgspec.Struct, array_like=True):
    """A request that was accepted.

    Attributes:
        seq: number of choice 0; choice i has seq + i.
        indexes: its choices that the journal has.
    """

    seq: int
    message: Submit
    indexes: list[int]


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
    """Everything of one step of the scheduler, in this order.

    Attributes:
        acknowledged: numbers of ended requests whose clients have their ends.
    """

    accepted: list[Accepted] = []
    tokens: list[TokenRecord] = []
    logprobs: list[LogprobRecord] = []
    ended: list[Ended] = []
    acknowledged: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not any((self.accepted, self.tokens, self.logprobs, self.ended, self.acknowledged))


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


def tag(run: str) -> bytes:
    """Return the mark in a file that this run has given up."""
    return hashlib.sha256(run.encode()).digest()[:TAG_BYTES]


def make_frame(payload: bytes, checksum: int) -> tuple[bytes, int]:
    """Return the frame of a payload, and its checksum.

    Args:
        payload: what the frame holds.
        checksum: of the frame before; 0 for the first one.
    """
    checksum = zlib.crc32(payload, checksum)
    return FRAME_HEAD.pack(len(payload), checksum) + payload, checksum
