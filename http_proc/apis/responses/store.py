"""Where responses are kept, for requests that refer to them."""

from typing import Any, Protocol

from http_proc.apis.responses.schema import ResponseObject
from http_proc.protocol.errors import invalid


class ResponseStore(Protocol):
    """Keep responses with their input, by id.

    Attributes:
        keeps_responses: whether a saved response can be read again; the answer's field `store`.
    """

    keeps_responses: bool

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """Return the input and output items up to and with a response. Raise ApiError."""

    def item(self, item_id: str, name: str) -> dict[str, Any]:
        """Return an item; `name` is the request's name of the reference. Raise ApiError."""

    def save(self, response: ResponseObject, input_items: list[dict[str, Any]]) -> None:
        """Keep a finished response, whose request has `store`, and the items of its input."""


class NoResponseStore:
    """A ResponseStore that keeps nothing."""

    keeps_responses = False

    def conversation(self, response_id: str) -> list[dict[str, Any]]:
        """Refuse the reference."""
        raise invalid(
            f"previous_response_id is {response_id!r}, and this server stores no responses: send"
            " the items of the whole conversation in input",
            "previous_response_id",
        )

    def item(self, item_id: str, name: str) -> dict[str, Any]:
        """Refuse the reference."""
        raise invalid(
            f"{name} refers to {item_id!r}, and this server stores no items: send the item itself",
            name,
        )

    def save(self, response: ResponseObject, input_items: list[dict[str, Any]]) -> None:
        """Keep nothing."""
