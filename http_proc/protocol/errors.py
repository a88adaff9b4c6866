"""What goes wrong, in OpenAI's shape: {"error": {message, type, param, code}} and a status."""

import math
from collections.abc import Mapping

import msgspec

from quadriga import errors
from quadriga.errors import QuadrigaError

RETRY_AFTER = 1
"""Seconds after which it makes sense to try again when the queue was full."""
RETRY_AFTER_RESTART = 10
"""The same, when the server is stopping or has lost a process."""

INVALID = "invalid_request_error"
MAX_MESSAGE_CHARS = 1000
"""A message may quote what the client has sent."""


class ErrorBody(msgspec.Struct):
    """param: the request's field that is to blame; code: a short name of what went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with this status and body. retry_after: seconds; allow: methods; or None."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = shortened(message)
        super().__init__(message)
        self.status = status
        self.answer = ErrorAnswer(ErrorBody(message, kind, param, code))
        self.retry_after = retry_after
        self.allow: str | None = None

    def body(self) -> bytes:
        return msgspec.json.encode(self.answer)

    def headers(self) -> dict[str, str]:
        seconds = None if self.retry_after is None else math.ceil(self.retry_after)
        headers = {"Retry-After": seconds, "Allow": self.allow}
        return {name: str(value) for name, value in headers.items() if value is not None}


def shortened(text: str) -> str:
    """Return a text without its middle where it is long: values stand there, names around them."""
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    half = MAX_MESSAGE_CHARS // 2
    return f"{text[:half]} ... {text[-half:]}"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it stands."""
    return ApiError(400, message, INVALID, param, code)


_STATUS: dict[type[QuadrigaError], tuple[int, str, float | None]] = {
    errors.InvalidRequest: (400, INVALID, None),
    errors.PromptTooLong: (400, INVALID, None),
    errors.QueueFull: (429, "rate_limit_error", RETRY_AFTER),
    errors.DeadlineExceeded: (504, "timeout_error", None),
    errors.ServerStopping: (503, "server_error", RETRY_AFTER_RESTART),
    errors.ServerFailed: (503, "server_error", RETRY_AFTER_RESTART),
    errors.ServerUnreachable: (503, "server_error", RETRY_AFTER_RESTART),
    errors.SlowReader: (503, "server_error", RETRY_AFTER),
}
_CODES = {errors.PromptTooLong.code: "context_length_exceeded"}
_KNOWN_WORDS = {errors.PromptTooLong.code: "this model's maximum context length is exceeded: "}
"""Of OpenAI's, by which clients tell errors apart."""


def from_ring(error: QuadrigaError, names: Mapping[str, str]) -> ApiError:
    """An error of the ring as a web error. names: what the ring's fields are called here."""
    status, kind, retry_after = _STATUS.get(type(error), (500, "server_error", None))
    retry_after = getattr(error, "retry_after", None) or retry_after
    field = getattr(error, "field", "")
    code = _CODES.get(error.code, error.code)
    param, message = names.get(field, field), str(error)
    if field and message.startswith(field):
        message = param + message[len(field) :]
    message = _KNOWN_WORDS.get(error.code, "") + message
    return ApiError(status, message, kind, param or None, code, retry_after)
