"""The file of the journal: its format, how it is read, and how it grows by whole frames."""

import errno
import fcntl
import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from quadriga import disk
from quadriga.wire import client, sockets, to_scheduler
from quadriga.wire.logprobs import LogprobBlock
from scheduler_proc.state.request import Request

# The format of the journal's file, and how it is read.
#
# | bytes | content |
# |---|---|
# | 8 | MAGIC, which holds the version of the format |
# | 8 | zeros; the `run_tag` of its writer once that has given the file up |
# | … | frames: length and checksum of the payload (uint32 little-endian), then the payload |
#
# The checksum of a frame is the CRC-32 of its payload, started with the checksum of the frame
# before, so that a missing, repeated or moved frame is noticed like a damaged one. Payloads are
# msgpack: first a JournalHeader, then JournalRecords.

MAGIC = b"QDRJRNL2"
TAG_BYTES = 8
NOT_GIVEN_UP = bytes(TAG_BYTES)
FRAME_HEAD = struct.Struct("<II")
SUBMIT_TAG = str(to_scheduler.Submit.__struct_config__.tag)

_encode = msgspec.msgpack.Encoder().encode
_decode_submit = msgspec.msgpack.Decoder(to_scheduler.Submit).decode


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
    def of(cls, seq: int, message: to_scheduler.Submit, indexes: list[int]) -> "AcceptedRecord":
        """Return the record of a message that was submitted."""
        return cls(seq, msgspec.Raw(_encode(_written(message))), indexes)

    def submit(self) -> to_scheduler.Submit:
        """Return the message. Raise msgspec.DecodeError if it is none."""
        return _decode_submit(self.message)


def _written(message: to_scheduler.Submit) -> tuple[object, ...]:
    """Return the fields that the journal has of a message, behind its tag.

    These are those of a request without a tenant, a prefix of its own and a trace; of one that
    begins; of one without an adapter; of one without a cache hint; or all of them.
    """
    if message.sender:
        message = msgspec.structs.replace(message, since=0, sender=0)
    fields = message.__struct_fields__
    if message.cache is None:
        end = "cache"
        if message.adapter is None:
            end = "adapter"
            if not (message.progress or message.placement):
                has_tenant = message.tenant or message.cache_salt or message.trace
                end = "progress" if has_tenant else "tenant"
        fields = fields[: fields.index(end)]
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
    error: client.ErrorInfo | None
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


def vector_record(request: Request) -> LogprobRecord:
    """Return the vector of a request for log-probabilities: they are those of its prompt."""
    assert request.vector is not None
    return LogprobRecord(request.seq, [], [LogprobBlock(request.vector, 0, b"", b"")])


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


WRITE_BYTES = 1 << 20  # a new file is written in pieces of this size
SYNC_INTERVAL_S = 1.0


class JournalFile:
    """Append frames, and replace the file.

    Every method but `give_up` and `release` raises OSError where the disk fails. The owner then
    gives the file up, and may start a new one.

    Attributes:
        path: where the file is. Its directory is locked as long as this process lives.
        size: number of bytes of whole frames; 0 while no file is open.
    """

    def __init__(self, path: Path, header: JournalHeader, durable: bool) -> None:
        """Initialize. durable: sync the file, so that it survives a loss of power."""
        self.path = path
        self.header = header
        self.size = 0
        self._durable = durable
        self._checksum = 0
        self._fd = -1
        self._directory_fd = -1
        self._syncer = Syncer() if durable else None

    def lock_directory(self) -> None:
        """Make the directory and lock it, if that is not done yet.

        Raises:
            BlockingIOError: another process has the lock; it is released when that process ends.
        """
        if self._directory_fd >= 0:
            return
        if not self.path.parent.is_dir():
            disk.make_directory(self.path.parent)
        self._directory_fd = _lock(self.path.parent)

    def append(self, payload: bytes) -> None:
        """Append a frame. Where that fails half-way, the file ends with the frame before."""
        if self._syncer is not None:
            self._syncer.raise_error()
        frame, checksum = make_frame(payload, self._checksum)
        try:
            _write(self._fd, frame)
        except OSError:
            with suppress(OSError):  # a reader stops at half a frame, too
                os.ftruncate(self._fd, self.size)
            raise
        self.size += len(frame)
        self._checksum = checksum
        if self._syncer is not None:
            self._syncer.mark_dirty()

    def rewrite(self, payloads: Iterable[bytes]) -> None:
        """Write a new file, and put it in the place of the present one once it is whole."""
        self.lock_directory()
        fresh = self.path.with_suffix(".new")
        fd = disk.open_regular(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            size, checksum = self._fill(fd, payloads)
            if self._durable:
                os.fdatasync(fd)
            os.replace(fresh, self.path)
        except OSError:
            _close(fd)
            with suppress(OSError):  # it only takes space
                os.unlink(fresh)
            raise
        self._close()
        self._fd, self.size, self._checksum = fd, size, checksum
        if self._syncer is not None:
            self._syncer.set_file(fd)
            os.fsync(self._directory_fd)

    def _fill(self, fd: int, payloads: Iterable[bytes]) -> tuple[int, int]:
        """Write a whole file. Return its size, and the checksum of its last frame."""
        frame, checksum = make_frame(sockets.encode(self.header), 0)
        buffer, size = bytearray(MAGIC + NOT_GIVEN_UP + frame), 0
        for payload in payloads:
            frame, checksum = make_frame(payload, checksum)
            buffer += frame
            if len(buffer) >= WRITE_BYTES:
                _write(fd, bytes(buffer))
                size += len(buffer)
                buffer.clear()
        _write(fd, bytes(buffer))
        return size + len(buffer), checksum

    def give_up(self) -> None:
        """Close the file, and keep the next scheduler of this run from resuming it.

        By then its requests may have ended. A durable file stays for a later run that resumes:
        after a loss of power it is better to compute a request twice than to lose it.
        """
        if self._directory_fd < 0:
            return  # it may be another server's
        with suppress(OSError):
            if self._durable:
                self._mark_given_up()
            else:
                os.unlink(self.path)
        self._close()

    def _mark_given_up(self) -> None:
        """Mark the file as given up, in place: a full disk has room for that."""
        if self._fd < 0:
            self._fd = disk.open_regular(self.path, os.O_WRONLY)
        os.pwrite(self._fd, run_tag(self.header.run), len(MAGIC))

    def release(self) -> None:
        """Leave file and directory to another process, as they are."""
        self._close()
        if self._directory_fd >= 0:
            _close(self._directory_fd)
        self._directory_fd = -1

    def remove(self) -> None:
        """Remove the file, which no request needs any more."""
        self._close()
        with suppress(FileNotFoundError):
            os.unlink(self.path)

    def _close(self) -> None:
        if self._syncer is not None:
            self._syncer.set_file(-1)
        if self._fd >= 0:
            _close(self._fd)
        self._fd, self.size = -1, 0


def _write(fd: int, data: bytes) -> None:
    """Write all bytes."""
    written = os.write(fd, data)
    while written < len(data):
        if written <= 0:
            raise OSError(errno.EIO, "nothing was written")
        data = data[written:]
        written = os.write(fd, data)


def _close(fd: int) -> None:
    """Close a file; errors do not matter any more."""
    with suppress(OSError):
        os.close(fd)


def _lock(directory: Path) -> int:
    """Lock a directory by its own descriptor: that leaves no file, and no child inherits it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise BlockingIOError(errno.EWOULDBLOCK, "another server has it", str(directory)) from None
    except OSError as error:  # some network file systems
        logging.warning(
            "%s cannot be locked (%s): make sure that no other server uses it as --journal",
            directory,
            error,
        )
    return fd


class Syncer:
    """Sync a file in a thread, at most once in SYNC_INTERVAL_S."""

    def __init__(self) -> None:
        self._fd = -1
        self._error: OSError | None = None
        self._dirty = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="journal-sync", daemon=True).start()

    def set_file(self, fd: int) -> None:
        """Sync this file from now on; -1 for none."""
        with self._lock:
            self._fd, self._error = fd, None

    def mark_dirty(self) -> None:
        """Ask for a sync of what was written."""
        self._dirty.set()

    def raise_error(self) -> None:
        """Raise the OSError of a sync that failed.

        The system may have dropped what it could not write, and reports that only once.
        """
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            self._dirty.wait()
            self._dirty.clear()
            self._sync()
            time.sleep(SYNC_INTERVAL_S)

    def _sync(self) -> None:
        with self._lock:
            synced, fd = self._fd, -1
            try:
                fd = os.dup(synced) if synced >= 0 else -1
            except OSError as error:
                self._error = error
        if fd < 0:
            return
        try:
            os.fdatasync(fd)
        except OSError as error:
            with self._lock:
                if self._fd == synced:
                    self._error = error
        finally:
            _close(fd)
