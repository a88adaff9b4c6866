"""Where responses are kept, for requests that refer to them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from http_proc.apis.responses.schema import ResponseObject
from http_proc.core.call import Call
from http_proc.core.errors import ApiError, invalid
from http_proc.core.gateway import Gateway, Key

Items = list[dict[str, Any]]
REMEDY = "it was started with --no-store, or this is a line of a batch"


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """A response that has ended, with what it was made of.

    Attributes:
        input_items: the items of its own request, without those that it continues.
        is_kept: the response is kept under its id; else only its conversation gets the items.
        conversation_id: conversation that gets the items of input and output; None: none does.
        events: its stream, also if its client did not ask for one.
        is_repeat: an earlier gateway may have kept it.
    """

    response: ResponseObject
    input_items: Items
    is_kept: bool
    conversation_id: str | None
    events: bytes
    is_repeat: bool = False


class ResponseIds:
    """The ids of responses that are being made, which no other response may get."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._taken

    @contextmanager
    def taking(self, response_id: str) -> Iterator[None]:
        """Take an id in a `with` block."""
        is_first = response_id not in self._taken
        self._taken.add(response_id)
        try:
            yield
        finally:
            if is_first:
                self._taken.discard(response_id)


class ResponseStore:
    """Keep responses and conversations, each of which belongs to the caller's tenant.

    This one keeps nothing, and refuses references to what is kept.

    Attributes:
        ids: those of the responses that are being made.
    """

    def __init__(self) -> None:
        self.ids = ResponseIds()

    @property
    def keeps_responses(self) -> bool:
        """Whether a saved response can be read again; the answer's field `store`."""
        return False

    async def unused_id(self, response_id: str, is_taken: bool = False) -> str:  # noqa: ARG002
        """Return the id for a new response, which is longer if it is taken."""
        return response_id

    def check_size(self, items: Items) -> None:
        """Raise an ApiError where a response with these items cannot be kept for their size."""

    async def items_of_response(self, response_id: str) -> Items:
        """Return the input and output items up to and with a response. Raise ApiError."""
        raise _refusal("previous_response_id", response_id, "responses")

    async def items_of_conversation(self, conversation_id: str) -> Items:
        """Return the items of a conversation. Raise ApiError."""
        raise _refusal("conversation", conversation_id, "conversations")

    async def items(self, names: Mapping[str, str]) -> Items:
        """Return items. Raise ApiError.

        Args:
            names: the request's name of the reference to each, by their ids.
        """
        for item_id, name in names.items():
            raise _refusal(name, item_id, "items")
        return []

    async def save(self, ended: EndedResponse) -> bool:  # noqa: ARG002
        """Keep a response. Return whether that has succeeded."""
        return False


# Without one, a gateway keeps nothing.
RESPONSE_STORE = Key[ResponseStore]("response_store")
_NO_STORE = ResponseStore()


def store_of(gateway: Gateway, call: Call) -> ResponseStore:
    """Return the store for the answer of a call."""
    store = gateway.get(RESPONSE_STORE) if call.may_keep else None
    return _NO_STORE if store is None else store


def _refusal(name: str, value: str, kept: str) -> ApiError:
    return invalid(
        f"{name} is {value!r}, and this server stores no {kept} ({REMEDY}): send the items of the"
        " whole conversation in input",
        name,
    )
