"""The contract of the parser of answers."""

from collections.abc import Mapping
from typing import Any, Protocol

from http_proc.answer.events import AnswerEvent


class AnswerParser(Protocol):
    """Parse one answer, piece by piece, however it is cut into pieces."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the answer and return what is certain now."""

    def finish(self) -> list[AnswerEvent]:
        """Return the rest; nothing may be pushed afterwards."""


class ToolSchemas(dict[str, Mapping[str, Any]]):
    """The JSON schema of the arguments of each tool of a request, by the tool's name."""
