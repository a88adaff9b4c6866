"""Events of an answer, in the order in which the model writes them, and the whole answer."""

import string
from collections.abc import Iterable
from dataclasses import dataclass, field

from http_proc.resumption import id_chars

_ID_ALPHABET = string.ascii_letters + string.digits
# Mistral's templates accept no other length.
ID_LENGTH = 9


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call, with its whole name."""

    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """A piece of the JSON text of the arguments of the call that began last."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the call that began last: its arguments are complete."""


AnswerEvent = TextDelta | ReasoningDelta | CallBegin | ArgumentsDelta | CallEnd


@dataclass(slots=True)
class ParsedCall:
    """A tool call.

    Attributes:
        id: id of the call, from the model or made by the gateway.
        name: name of the tool.
        arguments: JSON text, cut off or broken unless `is_complete`.
        is_complete: the model has written the arguments to their end.
    """

    id: str
    name: str
    arguments: str = ""
    is_complete: bool = False


@dataclass(slots=True)
class ParsedAnswer:
    """A whole answer.

    Attributes:
        text: the answer proper.
        reasoning: the text of the reasoning, without its marks.
        calls: tool calls in order.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Iterable[AnswerEvent]) -> None:
        """Add the next events."""
        for event in events:
            match event:
                case TextDelta():
                    self.text += event.text
                case ReasoningDelta():
                    self.reasoning += event.text
                case CallBegin():
                    self.calls.append(ParsedCall(event.id, event.name))
                case ArgumentsDelta():
                    self.calls[-1].arguments += event.text
                case CallEnd():
                    self.calls[-1].is_complete = True


def new_call_id() -> str:
    """Return a new id of a tool call."""
    return id_chars(ID_LENGTH, _ID_ALPHABET)
