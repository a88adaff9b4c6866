"""Reads a journal back: a beginning of what was written, whatever has become of the file."""

import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from scheduler_proc.durability.journal_records import (
    FRAME_HEAD,
    MAGIC,
    NOT_GIVEN_UP,
    TAG_BYTES,
    JournalHeader,
    JournalRecord,
)
from scheduler_proc.durability.journal_recovery import JournalState, RecoveredRequest

_decode_header = msgspec.msgpack.Decoder(JournalHeader).decode
_decode_record = msgspec.msgpack.Decoder(JournalRecord).decode


class Contents(NamedTuple):
    """What a journal holds.

    Attributes:
        header: None where there is no file, or one without a header that can be read.
        found: requests by number, in order; those that are not needed any more are left out.
        num_unread_bytes: after the last frame that is whole and makes sense.
        given_up_by: the `tag` of the run that could not go on with the file, or zeros.
    """

    header: JournalHeader | None
    found: list[RecoveredRequest]
    num_unread_bytes: int = 0
    given_up_by: bytes = NOT_GIVEN_UP

    @property
    def num_unfinished(self) -> int:
        return sum(one.ended is None for one in self.found)


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
    header: JournalHeader | None = None
    state = JournalState(0)
    for payload in frames:
        try:
            if header is None:
                header = _decode_header(payload)
                state = JournalState(header.vocab_size)
            else:
                state.take(_decode_record(payload))
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
            len(state.found),
        )
    in_order = [state.found[seq] for seq in sorted(state.found)]
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
