"""Pages of OpenAI's lists: limit, after, and whether more follows."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from aiohttp import web

from http_proc.protocol.errors import invalid


class Listed(Protocol):
    """An object with an id."""

    @property
    def id(self) -> str:
        """Its id."""


T = TypeVar("T", bound=Listed)


def page(request: web.Request, objects: Sequence[T], default: int, largest: int) -> tuple[
    list[T], bool
]:  # fmt: skip
    """Return the objects that the query asks for, and whether more follow.

    Args:
        request: has the query.
        objects: all of them, the newest first.
        default: number of objects without `limit`.
        largest: the largest `limit`.

    Raises:
        ApiError: limit, order or after has no such value.
    """
    limit, order = _limit(request, default, largest), request.query.get("order", "desc")
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


def _limit(request: web.Request, default: int, largest: int) -> int:
    text = request.query.get("limit", str(default))
    is_short_number = text.isascii() and text.isdigit() and len(text.lstrip("0")) < 10
    if not (is_short_number and 1 <= int(text.lstrip("0") or "0") <= largest):
        raise invalid(f"limit is {text[:100]!r}: it must be from 1 to {largest}", "limit")
    return int(text.lstrip("0"))
