"""What is written of a batch: its bodies and its state, its input file, and its output files.

The input file is read and checked line by line. The answered lines are logged in an output file and
an error file.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Generator, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import msgspec

from http_proc.generation.schema import RequestBody
from quadriga import disk
from quadriga.clock import now


class BatchStatus(str, Enum):
    """The state of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether the batch has not ended."""
        return self in (
            BatchStatus.VALIDATING,
            BatchStatus.IN_PROGRESS,
            BatchStatus.FINALIZING,
            BatchStatus.CANCELLING,
        )


class CreateBatchRequest(RequestBody):
    """POST /v1/batches. metadata: at most 16 texts by name, returned with the batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None


class LineError(msgspec.Struct):
    """Why the input file is refused. line: number of the line, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineErrors(msgspec.Struct):
    """The first errors of an input file."""

    data: list[LineError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """Numbers of lines: of the file, answered with 200, and answered otherwise."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are in Unix seconds. model: null where the server has several."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    object: str = "batch"
    model: str | None = None
    errors: LineErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None

    def enter(self, status: BatchStatus) -> None:
        """Set the state and its time."""
        self.status = status
        setattr(self, f"{status.value}_at", int(now()))


class StoredBatch(msgspec.Struct, kw_only=True):
    """What is kept of a batch: itself, and the ids that its output files have from the start.

    Attributes:
        owner: name of the tenant by whose key it was made; "" for none.
        caller: name of the tenant that its lines run as, with its user; "" for none.
        has_users: its lines may name users.
    """

    batch: BatchObject
    answers_id: str
    failures_id: str
    owner: str = ""
    caller: str = ""
    has_users: bool = False


class BatchList(msgspec.Struct):
    """A page of batches, the newest first."""

    data: list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class OutputLine(msgspec.Struct):
    """A line of an output file or of an error file."""

    id: str
    custom_id: str
    response: dict[str, Any] | None
    error: LineError | None


# OpenAI's limit.
MAX_LINES = 50_000
MAX_CUSTOM_ID_CHARS = 512
# A file with more errors is read no further.
MAX_ERRORS = 100
READ_BYTES = 1024 * 1024
# A job that reads a whole file gives its thread back after this time.
STEP_S = 0.02


class InputLine(NamedTuple):
    """A request of a batch. body: its JSON, as it stands in the file."""

    number: int
    custom_id: str
    body: bytes


class BadLine(Exception):
    """A line that is no request."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.error = LineError(code, message, param)


class _Line(msgspec.Struct):
    custom_id: str | None = None
    method: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    stream: Any = None


_decode_line = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body).decode


def digest(custom_id: str) -> bytes:
    """Return 16 bytes that stand for a custom_id."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def read_lines(path: Path, endpoint: str, max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the requests of a file that a `FileCheck` has accepted."""
    with os.fdopen(disk.open_regular(path), "rb", READ_BYTES) as file:
        for number, data in _raw_lines(file, max_line_bytes):
            yield _parse(number, data, endpoint, max_line_bytes)


class FileCheck:
    """The check of an input file, in short steps, so that many checks take turns.

    Args:
        path: the file.
        endpoint: path of the endpoint that each line must name.
        max_line_bytes: length of the longest line.

    Attributes:
        num_lines: number of requests so far.
        errors: the first errors; [] at the end if the file can run.
    """

    def __init__(self, path: Path, endpoint: str, max_line_bytes: int) -> None:
        self._path = path
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self.num_lines = 0
        self.errors: list[LineError] = []

    def steps(self) -> Iterator[None]:
        """Check the file; each step takes about STEP_S."""
        seen: dict[bytes, int] = {}
        step = ShortStep()
        with os.fdopen(disk.open_regular(self._path), "rb", READ_BYTES) as file:
            for number, data in _raw_lines(file, self._max_line_bytes):
                self.num_lines += 1
                try:
                    _check_count(self.num_lines)
                    line = _parse(number, data, self._endpoint, self._max_line_bytes)
                    _check_unique(seen, line)
                except BadLine as bad:
                    bad.error.line = number
                    self.errors.append(bad.error)
                if len(self.errors) == MAX_ERRORS or self.num_lines > MAX_LINES:
                    return
                if step.is_over():
                    yield
        if not self.num_lines:
            self.errors.append(LineError("empty_file", "the input file has no line"))


class ShortStep:
    """The time of one step of a job, which goes on after others have had their steps."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + STEP_S

    def is_over(self) -> bool:
        """Return whether the step is over; then the next one begins."""
        if time.monotonic() < self._ends_at:
            return False
        self._ends_at = time.monotonic() + STEP_S
        return True


def _check_count(num_lines: int) -> None:
    if num_lines > MAX_LINES:
        raise BadLine("too_many_requests", f"a batch has at most {MAX_LINES} lines: split the file")


def _check_unique(seen: dict[bytes, int], line: InputLine) -> None:
    first = seen.setdefault(digest(line.custom_id), line.number)
    if first != line.number:
        raise BadLine(
            "duplicate_custom_id",
            f"custom_id {line.custom_id[:100]!r} stands in line {first}, too: each must be unique",
            "custom_id",
        )


def _raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each line that is not blank, cut after the limit + 1."""
    number = 0
    while data := file.readline(max_line_bytes + 1):
        number += 1
        rest = data
        while not rest.endswith(b"\n") and (rest := file.readline(READ_BYTES)):
            pass
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        if data.strip():
            yield number, data


def _parse(number: int, data: bytes, endpoint: str, max_line_bytes: int) -> InputLine:
    """Return the request of a line. Raise BadLine."""
    if len(data) > max_line_bytes:
        raise BadLine(
            "line_too_long",
            f"the line is over {max_line_bytes} bytes: shorten the prompt, or start the server with"
            " a larger --max-body-bytes",
        )
    try:
        line = _decode_line(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadLine("invalid_json_line", f"the line is no request in JSON: {error}") from None
    if not line.custom_id or len(line.custom_id) > MAX_CUSTOM_ID_CHARS:
        raise BadLine(
            "invalid_custom_id",
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters",
            "custom_id",
        )
    if line.method != "POST":
        raise BadLine("invalid_method", f"method is {_short(line.method)}: use 'POST'", "method")
    if line.url != endpoint:
        raise BadLine(
            "mismatched_url",
            f"url is {_short(line.url)}: it must be the batch's endpoint, {endpoint!r}",
            "url",
        )
    return InputLine(number, line.custom_id, _body(line.body))


def _body(raw: msgspec.Raw) -> bytes:
    """Return the JSON of a body. Raise BadLine unless it is an object that asks for no stream."""
    try:
        body = _decode_body(raw)
    except (msgspec.DecodeError, RecursionError):
        raise BadLine("invalid_body", "body must be a JSON object", "body") from None
    if body.stream:
        raise BadLine(
            "stream_not_supported", "body.stream is true: a batch has whole answers", "body.stream"
        )
    return bytes(raw)


def _short(text: str | None) -> str:
    return repr(None if text is None else text[:100])


# What a power cut may take: these lines are answered again.
MAX_UNSYNCED_LINES = 64
SYNC_INTERVAL_S = 1.0


class _Answered(msgspec.Struct):
    custom_id: str
    response: Any
    error: Any


_decode = msgspec.json.Decoder(_Answered).decode


class LineLog:
    """The output of a batch. Its methods may be called in any thread.

    The output file and the error file are the state of the batch: a line whose custom_id stands in
    one of them has its answer and never gets another one. A line that a crash has cut is removed
    when they are opened.

    Args:
        answers: path of the output file.
        failures: path of the error file.

    Attributes:
        num_completed: lines of the output file.
        num_failed: lines of the error file.
    """

    def __init__(self, answers: Path, failures: Path) -> None:
        self._paths = (answers, failures)
        self._lock = threading.Lock()
        self._answered: set[bytes] = set()
        self._files: list[_AppendFile] = []
        self.num_completed = self.num_failed = 0

    def open(self) -> Iterator[None]:
        """Open the files, remove lines that were cut, and find what is answered, in short steps."""
        self.close()
        files = [_AppendFile(path) for path in self._paths]
        with self._lock:
            self._files = files
        counts = []
        for file in files:
            counts.append((yield from file.recover(self._answered)))
        disk.sync_directory(self._paths[0].parent)
        self.num_completed, self.num_failed = counts

    def has(self, custom_id: str) -> bool:
        """Return whether a line has its answer."""
        return digest(custom_id) in self._answered

    def append(self, custom_id: str, line: bytes, is_failure: bool) -> bool:
        """Write the answer of a line, unless it has one or the log is closed.

        Args:
            custom_id: of the line.
            line: its answer as JSON, without a newline.
            is_failure: it belongs into the error file.

        Returns:
            Whether it was written.

        Raises:
            OSError: nothing was written; it can be tried again.
        """
        key = digest(custom_id)
        with self._lock:
            if key in self._answered or not self._files:
                return False
            self._files[is_failure].append(line + b"\n")
            self._answered.add(key)
            self.num_failed += is_failure
            self.num_completed += not is_failure
            return True

    def sync(self) -> None:
        """Make all lines durable. Raise OSError."""
        with self._lock:
            for file in self._files:
                file.sync()

    def close(self) -> None:
        """Close the files. What is appended later is discarded."""
        with self._lock:
            files, self._files = self._files, []
            for file in files:
                file.close()


class _AppendFile:
    """A file to whose end whole lines are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = disk.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._fd).st_size
        self._num_unsynced = 0
        self._synced_at = time.monotonic()

    def recover(self, answered: set[bytes]) -> Generator[None, None, int]:
        """Cut the file before the first broken line; return the number of lines before it.

        Each step takes about STEP_S.
        """
        size = num_lines = 0
        step = ShortStep()
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line in file:
                try:
                    key = digest(_decode(line).custom_id)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                if not line.endswith(b"\n"):
                    break
                answered.add(key)
                size, num_lines = size + len(line), num_lines + 1
                if step.is_over():
                    yield
            if size < self._size:
                lost = self._size - size
                logging.warning("%s: %d bytes after line %d are cut", self._path, lost, num_lines)
                os.ftruncate(file.fileno(), size)
                os.fsync(file.fileno())
                self._size = size
        return num_lines

    def append(self, line: bytes) -> None:
        """Write a line, and sync at times. Raise OSError if it is not in the file."""
        try:
            disk.write_all(self._fd, line)
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(line)
        self._num_unsynced += 1
        now = time.monotonic()
        if self._num_unsynced >= MAX_UNSYNCED_LINES or now - self._synced_at >= SYNC_INTERVAL_S:
            try:
                self.sync()
            except OSError as error:  # the line is in the file, and `sync` before the end counts
                logging.warning("%s cannot be synced: %s", self._path, error)

    def sync(self) -> None:
        """Make the file durable."""
        if self._num_unsynced:
            os.fsync(self._fd)
        self._num_unsynced, self._synced_at = 0, time.monotonic()

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)
