"""Checks of a call's arguments, with errors in the caller's words."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import msgspec

from quadriga.errors import InvalidRequest
from quadriga.keywords import check_keywords
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.validation import shown_number
from quadriga.wire.messages.from_client import ChatMessage

# Chat templates may know further roles, so that only a misspelt one of these is refused.
COMMON_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_SHOWN_CHARS = 40
# Fields of messages whose values are any JSON.
JSON_FIELDS = ("tools", "template_args", "tool_calls", "json_schema", "structural_tag")


def shown(value: Any) -> str:
    """Return a value and its type for an error message: `5, an int`."""
    kind = type(value).__name__
    article = "an" if kind[0] in "aeiou" else "a"
    text = repr(value)
    return f"{article} {kind}" if len(text) > MAX_SHOWN_CHARS else f"{text}, {article} {kind}"


def check_options(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for a keyword that a call does not have; sampling fields get a hint."""
    known = list(known)
    for name in given:
        if name == "sampling_params":
            raise TypeError(f"{call}() has no keyword 'sampling_params': it is called params here")
        if name not in known and hasattr(SamplingParams, name):
            raise TypeError(
                f"{call}() has no keyword {name!r}: it is a field of SamplingParams, as in"
                f" {call}(prompt, SamplingParams({name}=…))"
            )
    check_keywords(call, given, known)


def params_of_each(params: Any, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters of each prompt; a single SamplingParams or None is for all of them."""
    if not isinstance(params, list | tuple):
        return [checked_params(params)] * num_prompts
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"params is a list of {len(params)} for {num_prompts} prompts: give one SamplingParams"
            " for all prompts, or one for each",
            "params",
        )
    return [checked_params(item) for item in params]


def checked_params(params: Any) -> SamplingParams:
    """Return sampling parameters, the defaults for None. Raise InvalidRequest for another type."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    example = "SamplingParams(**params)" if isinstance(params, dict) else "SamplingParams(seed=1)"
    raise InvalidRequest(
        f"params is {shown(params)}: it must be a SamplingParams, as in {example}", "params"
    )


def check_is_chat(messages: Any) -> None:
    """Raise InvalidRequest unless a value is a chat or a list of chats."""
    chats = [messages] if not _is_list(messages) or not all(map(_is_list, messages)) else messages
    for chat in chats:
        if not _is_list(chat) or not chat or not isinstance(chat[0], dict):
            raise InvalidRequest(
                f"messages is {shown(chat)}: a chat is a list of maps, as in"
                ' [{"role": "user", "content": "Hello!"}]',
                "messages",
            )


def checked_chat(chat: Sequence[Any]) -> list[ChatMessage]:
    """Return the turns of a chat. Raise InvalidRequest for a wrong turn or a misspelt role."""
    try:
        turns = msgspec.convert(list(chat), list[ChatMessage])
    except msgspec.ValidationError:
        raise _wrong_turn(chat) from None
    for index, turn in enumerate(turns):
        if turn.role not in COMMON_ROLES and (near := get_close_matches(turn.role, COMMON_ROLES)):
            raise InvalidRequest(
                f"turn {index} of the chat has the role {turn.role!r}: is it {near[0]!r}?", "prompt"
            )
    return turns


def _wrong_turn(chat: Sequence[Any]) -> InvalidRequest:
    """Return the error for the first turn that is no {role, content} map."""
    for index, turn in enumerate(chat):
        try:
            msgspec.convert(turn, ChatMessage)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "").replace(" - at $.", ", at ")
            reason = reason[0].lower() + reason[1:]
            return InvalidRequest(
                f"prompt is no chat: turn {index} is {shown(turn)}: {reason}", "prompt"
            )
    raise AssertionError("msgspec refused the chat, but accepts each of its turns")


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def check_integers(message: Any, field: str = "") -> None:
    """Raise InvalidRequest for an integer of a message that has more than 64 bits, with its field.

    JSON of the client, such as the schemas of tools, may have any integers.

    Args:
        message: a struct, or a value within one.
        field: name of the field that holds the value.
    """
    if isinstance(message, msgspec.Struct):
        for name in message.__struct_fields__:
            if name not in JSON_FIELDS:
                check_integers(getattr(message, name), name)
    elif isinstance(message, dict):
        for key, value in message.items():
            check_integers(key, field)
            check_integers(value, field)
    elif isinstance(message, list | tuple):
        for value in message:
            check_integers(value, field)
    elif isinstance(message, int) and not -(2**63) <= message < 2**64:
        raise InvalidRequest(
            f"{field} holds {shown_number(message)}: integers of a request are from {-(2**63)} to"
            f" {2**64 - 1}",
            field,
        )
