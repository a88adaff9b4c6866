"""The format of the journal's file.

| bytes | what |
|---|---|
| 8 | MAGIC, which has the format's version |
| 8 | zeros; once its writer has given the file up, that run's `tag` |
| … | frames: of the payload the length and the checksum, uint32 little-endian, then the payload |

The checksum of a frame is the CRC-32 of its payload, started with the checksum of the frame before,
so that a frame that is missing, repeated or moved is noticed like a damaged one. Payloads are
msgpack: first a Header, then Rounds.
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
    """Which run wrote the file, and for which model: requests cannot go on with another one.

    model: what the user called it. fingerprint: of its files.
    """

    run: str
    model: str
    fingerprint: str
    vocab_size: int
    context_length: int


class Accepted(msgspec.Struct, array_like=True):
    """seq: of its first choice; the others have the numbers after it. indexes: of its choices."""

    seq: int
    message: Submit
    indexes: list[int]


class TokenRecord(msgspec.Struct, array_like=True):
    """As in StepOutput."""

    seqs: list[int]
    token_ids: bytes
    time: float


class LogprobRecord(msgspec.Struct, array_like=True):
    """Log-probabilities of a request, where its client wants them: of tokens that it generated, a
    block each, and of its prompt."""

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
    admitted: float


class JournalRecord(msgspec.Struct, array_like=True):
    """All of a round, in this order. settled: those whose end the detokenizer has handed on."""

    accepted: list[Accepted] = []
    tokens: list[TokenRecord] = []
    told: list[LogprobRecord] = []
    ended: list[Ended] = []
    settled: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not (self.accepted or self.tokens or self.told or self.ended or self.settled)


def ended_of(request: Request) -> Ended:
    return Ended(
        request.seq,
        request.finish_reason,
        request.matched_stop,
        request.error,
        request.cached_tokens,
        request.admitted,
    )


def tag(run: str) -> bytes:
    """Return what stands in a file that this run has given up."""
    return hashlib.sha256(run.encode()).digest()[:TAG_BYTES]


def make_frame(payload: bytes, checksum: int) -> tuple[bytes, int]:
    """Return the frame of a payload, and its checksum.

    Args:
        payload: what the frame holds.
        checksum: of the frame before; 0 for the first one.
    """
    checksum = zlib.crc32(payload, checksum)
    return FRAME_HEAD.pack(len(payload), checksum) + payload, checksum
