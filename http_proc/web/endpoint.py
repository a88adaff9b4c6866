"""What the gateway knows of an endpoint: its route, its types and the format of its errors.

At the end come the pages of lists: limit, after, and whether more follows.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from aiohttp import web

from http_proc.core.answering import Answerer
from http_proc.core.errors import ApiError, ErrorAnswer, invalid

STREAM, LINES, PLAIN = "text/event-stream", "application/x-ndjson", "text/plain"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint(NamedTuple):
    """An endpoint of the gateway.

    Attributes:
        handler: answers the requests; or an Answerer, which knows no HTTP.
        response: type of the response's body; None: the endpoint is not in the document.
        body: type of the request's body, if it has one.
        body_type: content type of the request's body.
        sampling: the sampling fields beside those of `body`: name -> SamplingParams' name.
        streams: the response may be a stream instead.
        stream_type: content type of the stream.
        is_listed: the response may be a list of `response` instead.
        error_body: returns the body of an error in the format of the endpoint's API.
        error: type of that body.
        answers: the handler is an Answerer.
        is_resumable: the streams are resumable where the request asks for it.
    """

    path: str
    handler: Handler | Answerer
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
    body_type: str = "application/json"
    answers: bool = False
    is_resumable: bool = False


def post(
    path: str, handler: Handler, summary: str, body: Any, response: Any, **options: Any
) -> Endpoint:
    """Return an endpoint with the method POST."""
    return Endpoint(path, handler, summary, response, body, method="post", **options)


def answering(
    path: str, answerer: Answerer, summary: str, body: Any, response: Any, **options: Any
) -> Endpoint:
    """Return an endpoint with the method POST whose calls are answered without HTTP."""
    return Endpoint(path, answerer, summary, response, body, method="post", answers=True, **options)


def generating(
    path: str, answerer: Answerer, summary: str, body: Any, response: Any, **options: Any
) -> Endpoint:
    """Return an endpoint as `answering` whose answer may be a stream."""
    return answering(path, answerer, summary, body, response, streams=True, **options)


class Listed(Protocol):
    """An object with an id."""

    @property
    def id(self) -> str:
        """Its id."""


T = TypeVar("T", bound=Listed)
L = TypeVar("L")


def page(
    request: web.Request, objects: Sequence[T], default: int, largest: int
) -> tuple[list[T], bool]:
    """Return the objects that the query asks for, and whether more follow.

    Args:
        request: has the query.
        objects: all of them, the newest first.
        default: number of objects without `limit`.
        largest: the largest `limit`.

    Raises:
        ApiError: limit, order or after has no such value.
    """
    limit, order = limit_of(request, default, largest), request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid(f"order is {order[:100]!r}: it must be asc or desc", "order")
    if order == "asc":
        objects = objects[::-1]
    first, after = 0, request.query.get("after")
    if after:
        ids = [one.id for one in objects]
        if after not in ids:
            raise invalid(f"after is {after[:100]!r}: there is no such id in the list", "after")
        first = ids.index(after) + 1
    return list(objects[first : first + limit]), first + limit < len(objects)


def listed(kind: Callable[..., L], found: list[T], has_more: bool) -> L:
    """Return the body of a list: a page of objects, and the ids of its ends."""
    return kind(found, has_more, found[0].id if found else None, found[-1].id if found else None)


def limit_of(request: web.Request, default: int, largest: int) -> int:
    """Return the query's `limit`. Raise ApiError for one that is not from 1 to `largest`."""
    text = request.query.get("limit", str(default))
    is_short_number = text.isascii() and text.isdigit() and len(text.lstrip("0")) < 10
    if not (is_short_number and 1 <= int(text.lstrip("0") or "0") <= largest):
        raise invalid(f"limit is {text[:100]!r}: it must be from 1 to {largest}", "limit")
    return int(text.lstrip("0"))
