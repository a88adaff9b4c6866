"""Errors in OpenAI's format: a status and {"error": {message, type, param, code}}."""

import math
import re
from collections.abc import Mapping

import msgspec

from quadriga import errors
from quadriga.errors import QuadrigaError

# For a limit that other requests release soon, such as a full queue.
RETRY_AFTER_S = 1
# For a server that is stopping, or has lost a process.
RETRY_AFTER_RESTART_S = 10

POSITION_HEADER, WAIT_HEADER = "X-Queue-Position", "X-Expected-Wait"
# Read by the SDKs of OpenAI and Anthropic, which otherwise repeat what ends with a 500.
RETRY_HEADER = "X-Should-Retry"

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
# A message may quote what the client has sent.
MAX_MESSAGE_CHARS = 1000


class QueueHint(msgspec.Struct, kw_only=True):
    """Of an error body where the waiting queue is full: the place and wait of one more request."""

    queue_position: int | msgspec.UnsetType = msgspec.UNSET
    expected_wait: float | msgspec.UnsetType = msgspec.UNSET

    def take_hint(self, other: "QueueHint") -> None:
        """Take the values of another body."""
        self.queue_position, self.expected_wait = other.queue_position, other.expected_wait


class ErrorBody(QueueHint):
    """What went wrong. param: the request's field that is wrong; code: a short name."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(msgspec.Struct):
    """The body of every answer with an error status."""

    error: ErrorBody


class ApiError(Exception):
    """An error that ends a web request with a status and a body.

    Args:
        status: of the answer.
        message: what is wrong, and what to do.
        kind: the error's type; None: that of the status.
        param: the request's field that is wrong.
        code: a short name.
        retry_after: seconds, or None.

    Attributes:
        retry_after: for the header Retry-After.
        allow: methods, for the header Allow, or None.
        request_id: the X-Request-Id of the answer, once it is known.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        message = shortened(message)
        super().__init__(message)
        self.status = status
        self.answer = ErrorAnswer(ErrorBody(message, kind or _kind(status), param, code))
        self.retry_after = retry_after
        self.allow: str | None = None
        self.request_id: str | None = None

    def body(self) -> bytes:
        """Return the JSON body."""
        return msgspec.json.encode(self.answer)

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to this error."""
        seconds = None if self.retry_after is None else math.ceil(self.retry_after)
        values: dict[str, object] = {
            "Retry-After": seconds,
            "Allow": self.allow,
            POSITION_HEADER: self.answer.error.queue_position,
            WAIT_HEADER: self.answer.error.expected_wait,
            RETRY_HEADER: "false" if self.answer.error.code in _IN_VAIN else None,
        }
        missing = (None, msgspec.UNSET)
        return {name: str(value) for name, value in values.items() if value not in missing}


def _kind(status: int) -> str:
    """Return OpenAI's type of an error with this status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def shortened(text: str) -> str:
    """Return a long text without its middle, where values stand, and with its ends."""
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    half = MAX_MESSAGE_CHARS // 2
    return f"{text[:half]} ... {text[-half:]}"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400: the request can never be served in this form."""
    return ApiError(400, message, param=param, code=code)


_STATUS: dict[type[QuadrigaError], tuple[int, float | None]] = {
    errors.InvalidRequest: (400, None),
    errors.PromptTooLong: (400, None),
    errors.QueueFull: (429, RETRY_AFTER_S),
    errors.QuotaExceeded: (429, RETRY_AFTER_S),
    errors.DeadlineExceeded: (504, None),
    errors.ServerStopping: (503, RETRY_AFTER_RESTART_S),
    errors.ServerFailed: (503, RETRY_AFTER_RESTART_S),
    errors.ServerUnreachable: (503, RETRY_AFTER_RESTART_S),
    errors.SlowReader: (503, RETRY_AFTER_S),
}
# Errors of the server that the same request would run into again.
_IN_VAIN = (errors.NonFiniteLogits.code,)
_CODES = {errors.PromptTooLong.code: "context_length_exceeded"}
# OpenAI's wording, by which some clients recognize the error.
CONTEXT_EXCEEDED = "this model's maximum context length is exceeded: "
# Fields of the server that errors name beside the one that is wrong.
_OTHERS = ("max_new_tokens", "min_new_tokens", "truncate_prompt")
_PREFIXES = {errors.PromptTooLong.code: CONTEXT_EXCEEDED}


def from_server(error: QuadrigaError, names: Mapping[str, str]) -> ApiError:
    """Convert an error of the server. `names`: the request's name of each field of the server."""
    status, retry_after = _STATUS.get(type(error), (500, None))
    retry_after = getattr(error, "retry_after", None) or retry_after
    field = getattr(error, "field", "")
    code = _CODES.get(error.code, error.code)
    param, message = names.get(field, field), str(error)
    if field and message.startswith(field):
        message = param + message[len(field) :]
    for field in _OTHERS:
        if field in names:
            message = re.sub(rf"\b{field}\b", names[field], message)
    message = _PREFIXES.get(error.code, "") + message
    api_error = ApiError(status, message, param=param or None, code=code, retry_after=retry_after)
    if isinstance(error, errors.QueueFull) and error.queue_position is not None:
        hint = api_error.answer.error
        hint.queue_position = error.queue_position
        if error.expected_wait is not None:
            hint.expected_wait = round(error.expected_wait, 1)
    return api_error
