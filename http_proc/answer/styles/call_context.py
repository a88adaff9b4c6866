"""Read the names of tool calls and begin the calls, in every style."""

import re
from collections.abc import Callable
from typing import NamedTuple, Protocol

from http_proc.answer.event_writer import EventWriter
from http_proc.answer.marks import AnswerInput, Marks, Steps, UnexpectedText
from http_proc.answer.tool_schemas import ToolSchemas
from quadriga.answer_format import CallFormat

MAX_NAME_LENGTH = 256

_NAME = re.compile(r"[\w.\-/:$]+")


class CallContext(NamedTuple):
    """Hold the input, the output, the marks and the tools of a parser of tool calls.

    Attributes:
        source: the answer.
        writer: takes the events.
        marks: marks of the calls.
        tools: the tools of the request.
    """

    source: AnswerInput
    writer: EventWriter
    marks: CallFormat
    tools: ToolSchemas

    def begin(self, name: str, needs_known_name: bool, call_id: str = "") -> None:
        """Begin a call. The text consumed for it can no longer be returned as text.

        Raises:
            UnexpectedText: The name is not valid, or it is of no tool of the request and must be.
        """
        if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
            raise UnexpectedText
        if needs_known_name and name not in self.tools:
            raise UnexpectedText
        self.source.release()
        self.writer.begin_call(name, call_id)

    def read_name(self, ends: Marks) -> Steps[tuple[str, str]]:
        """Consume the text before a mark, and return the stripped text and the mark.

        The mark is not consumed.

        Raises:
            UnexpectedText: The text is too long for a name.
        """
        pieces: list[str] = []
        length = 0
        while True:
            num_read, mark = ends.find(self.source)
            if length + num_read > MAX_NAME_LENGTH:
                self.source.take(MAX_NAME_LENGTH - length)
                raise UnexpectedText
            length += num_read
            pieces.append(self.source.take(num_read))
            if mark:
                return "".join(pieces).strip(), mark
            yield from self.source.more()

    def types_of(self, tool: str) -> Callable[[str], frozenset[str]]:
        """Return the function that returns the types of an argument of the tool."""
        return lambda argument: self.tools.types(tool, argument)


class CallBody(Protocol):
    """Parse one call, without the marks around it."""

    def call(self, needs_known_name: bool) -> Steps[None]:
        """Parse a call that begins here, after whitespace.

        Raises:
            UnexpectedText: The text is not a call, or the arguments of the begun call are broken.
        """
