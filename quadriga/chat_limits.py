"""Limits on the shape of a chat: rendering it costs time for every turn, whatever it says."""

from collections.abc import Sequence

from quadriga.errors import InvalidRequest
from quadriga.messages.public import MAX_NAME_CHARS, MAX_ROLE_CHARS, MAX_TURNS, ChatMessage


def check_chat(messages: Sequence[ChatMessage]) -> None:
    """Raise InvalidRequest for a chat of too many turns, or with an overlong role or name."""
    if len(messages) > MAX_TURNS:
        raise InvalidRequest(
            f"prompt has {len(messages)} messages: at most {MAX_TURNS} are allowed; leave out the"
            " oldest, or join some",
            "prompt",
        )
    for message in messages:
        _check_length("role", message.role, MAX_ROLE_CHARS)
        _check_length("name", message.name, MAX_NAME_CHARS)
        _check_length("tool_call_id", message.tool_call_id, MAX_NAME_CHARS)


def _check_length(field: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise InvalidRequest(
            f"a message's {field} has {len(text)} characters: at most {limit} are allowed", field
        )
