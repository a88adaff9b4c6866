"""Read and check the input file of a batch, line by line."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from http_proc.apis.batch.batch_types import LineError
from quadriga import disk

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
