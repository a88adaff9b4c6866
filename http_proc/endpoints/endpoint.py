"""What the gateway knows of an endpoint: its route, its types and the format of its errors."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from http_proc.protocol.errors import ApiError, ErrorAnswer

STREAM, LINES, PLAIN = "text/event-stream", "application/x-ndjson", "text/plain"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(NamedTuple):
    """An endpoint of the gateway.

    Attributes:
        handler: answers the requests.
        response: type of the response's body; None: the endpoint is not in the document.
        body: type of the request's body, if it has one.
        sampling: the sampling fields beside those of `body`: name -> SamplingParams' name.
        streams: the response may be a stream instead.
        stream_type: content type of the stream.
        is_listed: the response may be a list of `response` instead.
        error_body: returns the body of an error in the format of the endpoint's API.
        error: type of that body.
    """

    path: str
    handler: Handler
    summary: str
    response: Any
    body: Any = None
    sampling: dict[str, str] | None = None
    method: str = "get"
    streams: bool = False
    is_listed: bool = False
    error_body: Callable[[ApiError], bytes] = ApiError.body
    error: Any = ErrorAnswer
    stream_type: str = STREAM


def post(
    path: str, handler: Handler, summary: str, body: Any, response: Any, **options: Any
) -> Endpoint:
    """Return an endpoint with the method POST."""
    return Endpoint(path, handler, summary, response, body, method="post", **options)
