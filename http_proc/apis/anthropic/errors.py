"""Errors in Anthropic's format."""

import re
from typing import Literal

import msgspec

from http_proc.protocol.errors import CONTEXT_EXCEEDED, ApiError, QueueHint

# The SDK retries 408, 409, 429 and everything from 500 on, so that the statuses stay as they are.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The SDK sends the whole conversation after this error.
NO_THREADS = "thread_unsupported_request"
_LENGTHS = re.compile(r"(\d+) tokens.*?(?:context is|pool holds) (\d+)")


class ErrorDetail(QueueHint):
    """What went wrong. details: {"error_code"} of an error from which the SDK recovers by it."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class MessageErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer with an error status, and of the event error of a stream."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None


def error_body(error: ApiError) -> bytes:
    """Return the JSON body of an error."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    detail = ErrorDetail(_TYPES.get(error.status, other), _message(error))
    detail.take_hint(error.answer.error)
    if error.answer.error.code == NO_THREADS:
        detail.details = {"error_code": NO_THREADS}
    return msgspec.json.encode(MessageErrorBody(error=detail, request_id=error.request_id))


def _message(error: ApiError) -> str:
    """Return the message; Claude Code recognizes a prompt that is too long by its begin."""
    message = error.answer.error.message
    if error.answer.error.code != "context_length_exceeded":
        return message
    message = message.removeprefix(CONTEXT_EXCEEDED)
    lengths = _LENGTHS.search(message)
    begin = f"{lengths[1]} tokens > {lengths[2]} maximum; " if lengths else ""
    return f"prompt is too long: {begin}{message}"
