"""The contract of the parser of answers."""

from collections.abc import Mapping
from typing import Any, Protocol

from http_proc.answer.events import AnswerEvent, ArgumentsDelta, CallBegin, CallEnd, TextDelta
from http_proc.protocol.tool_calls import ParsedCalls, ToolCallParser, ToolFormat
from http_proc.protocol.tool_calls import make_parser as old_parser
from quadriga.answer_format import AnswerFormat


class AnswerParser(Protocol):
    """Parse one answer, piece by piece, however it is cut into pieces."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the answer and return what is certain now."""

    def finish(self) -> list[AnswerEvent]:
        """Return the rest; nothing may be pushed afterwards."""


class ToolSchemas(dict[str, Mapping[str, Any]]):
    """The JSON schema of the arguments of each tool of a request, by the tool's name."""


def make_parser(
    answer_format: AnswerFormat,
    *,
    tools: ToolSchemas | None = None,
    begins_in_reasoning: bool = False,  # noqa: ARG001
    parses_reasoning: bool = True,  # noqa: ARG001
    max_calls: int | None = None,
) -> AnswerParser:
    """Return a parser for one answer."""
    return _Adapter(answer_format if tools else None, max_calls)


class _Adapter:
    """The parsers of whole calls, behind the contract."""

    def __init__(self, answer_format: AnswerFormat | None, max_calls: int | None) -> None:
        calls = answer_format.calls if answer_format else None
        self._parser: ToolCallParser | None = None
        if calls is not None:
            style = "mistral" if calls.is_list else "hermes" if calls.call_open else "llama3"
            self._parser = old_parser(ToolFormat(style))
        self._left = max_calls

    def push(self, text: str) -> list[AnswerEvent]:
        if self._parser is None:
            return [TextDelta(text)] if text else []
        return self._events(self._parser.push(text))

    def finish(self) -> list[AnswerEvent]:
        return [] if self._parser is None else self._events(self._parser.finish())

    def _events(self, part: ParsedCalls) -> list[AnswerEvent]:
        events: list[AnswerEvent] = [TextDelta(part.text)] if part.text else []
        for call in part.calls:
            if self._left == 0:
                break
            if self._left is not None:
                self._left -= 1
            events += [
                CallBegin(call.id, call.function.name),
                ArgumentsDelta(call.function.arguments),
                CallEnd(),
            ]
        return events
