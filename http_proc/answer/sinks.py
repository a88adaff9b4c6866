"""Write text and reasoning without the whitespace that belongs to the marks around them."""

from http_proc.answer.event_writer import EventWriter
from http_proc.answer.events import ReasoningDelta, TextDelta
from http_proc.answer.marks import Marks


class TextSink:
    """Write text unchanged."""

    kind: type[TextDelta | ReasoningDelta] = TextDelta

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer

    def write(self, text: str) -> None:
        """Write a piece."""
        self._writer.text(text)

    def after_calls(self) -> None:
        """Prepare for the text that follows calls."""

    def is_plain(self, text: str, marks: Marks) -> bool:
        """Return whether a piece without marks would be written at once and unchanged."""
        return text != "" and not marks.may_begin_in(text)

    def finish(self) -> None:
        """Write what was held back; the answer has ended."""


class TextAroundCalls(TextSink):
    """Write text without the whitespace that stands alone before, between and after calls."""

    def __init__(self, writer: EventWriter) -> None:
        super().__init__(writer)
        self._spaces: list[str] | None = []

    def write(self, text: str) -> None:
        """Write a piece."""
        if self._spaces is None:
            self._writer.text(text)
        elif not text or text.isspace():
            self._spaces.append(text)
        else:
            self._writer.text("".join(self._spaces) + text)
            self._spaces = None

    def is_plain(self, text: str, marks: Marks) -> bool:
        """Return whether a piece without marks would be written at once and unchanged."""
        return self._spaces is None and super().is_plain(text, marks)

    def after_calls(self) -> None:
        """Drop the whitespace before the calls, and hold back the whitespace after them."""
        self._spaces = []

    def finish(self) -> None:
        """Write what was held back; the answer has ended."""
        if self._spaces and not self._writer.num_calls:
            self._writer.text("".join(self._spaces))


class ReasoningSink(TextSink):
    """Write reasoning without the newlines at its end."""

    kind = ReasoningDelta

    def __init__(self, writer: EventWriter) -> None:
        super().__init__(writer)
        self._newlines: list[str] = []

    def write(self, text: str) -> None:
        """Write a piece."""
        content = text.rstrip("\r\n")
        if content:
            self._writer.reasoning("".join(self._newlines) + content)
            self._newlines.clear()
        if len(content) < len(text):
            self._newlines.append(text[len(content) :])

    def is_plain(self, text: str, marks: Marks) -> bool:
        """Return whether a piece without marks would be written at once and unchanged."""
        return not self._newlines and text[-1:] not in "\r\n" and super().is_plain(text, marks)
