"""Find marks in an answer that arrives in pieces, and write the text between them.

The first part searches for marks, the second writes text and reasoning without the whitespace that
belongs to the marks around them, the third runs a parser that is a generator of steps on the pieces
of its input. The parsers are coroutines: they read an `AnswerInput` and yield when they need more
of the answer.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from http_proc.answer.events import AnswerEvent, EventWriter, ReasoningDelta, TextDelta

T = TypeVar("T")
Steps = Generator[None, None, T]
Write = Callable[[str], object]

SPACE = re.compile(r"\s*")


class EndOfAnswer(Exception):
    """The answer ended where a parser needs more of it."""


class UnexpectedText(Exception):
    """Text follows that the format does not allow here."""


class AnswerInput:
    """The part of an answer that has arrived and is not consumed.

    Attributes:
        text: the part, from `at`; what stands before `at` is consumed.
        at: position of the next character.
        is_ended: the whole answer has arrived.
    """

    __slots__ = ("_held", "_last", "at", "is_ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_ended = False
        self._held: list[str] | None = None
        self._last = ""

    @property
    def has_rest(self) -> bool:
        """Whether a part of the answer is not consumed."""
        return self.at < len(self.text)

    def push(self, text: str) -> None:
        """Append the next piece."""
        self.text = self.text[self.at :] + text
        self.at = 0

    def more(self) -> Steps[None]:
        """Wait for the next piece.

        Raises:
            EndOfAnswer: there is none.
        """
        if self.is_ended:
            raise EndOfAnswer
        yield

    def take(self, length: int) -> str:
        """Consume characters and return them."""
        taken = self.text[self.at : self.at + length]
        self.at += length
        self._last = taken
        if self._held is not None:
            self._held.append(taken)
        return taken

    def take_rest(self) -> str:
        """Consume all that has arrived and return it."""
        return self.take(len(self.text) - self.at)

    def give_back(self, length: int | None) -> None:
        """Undo the last `take`, or its last characters; None: all of it."""
        length = len(self._last) if length is None else length
        self.at -= length
        if self._held:
            self._held[-1] = self._last[: len(self._last) - length]

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Consume what the pattern matches here, in the part that has arrived, and return it."""
        match = pattern.match(self.text, self.at)
        return self.take(match.end() - self.at) if match else ""

    def hold(self) -> None:
        """Keep what is consumed from now on, so that it can be returned as text."""
        self._held = []

    def release(self) -> str:
        """Return the text consumed since `hold` and stop keeping it."""
        held = "".join(self._held or ())
        self._held = None
        return held

    def peek(self) -> Steps[str]:
        """Return the next character."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def skip_space(self, write: Write | None = None) -> Steps[str]:
        """Consume whitespace and return the next character."""
        while True:
            space = self.take_match(SPACE)
            if space and write is not None:
                write(space)
            if self.at < len(self.text):
                return self.text[self.at]
            yield from self.more()

    def at_mark(self, mark: str) -> Steps[bool]:
        """Return whether the mark, which is not empty, stands here, without consuming it."""
        while not self.text.startswith(mark, self.at):
            rest = self.text[self.at : self.at + len(mark)]
            if self.is_ended or not mark.startswith(rest):
                return False
            yield from self.more()
        return True

    def skip_mark(self, mark: str) -> Steps[bool]:
        """Consume a mark and the whitespace before it, and return whether it stood here.

        Whitespace within the mark may be missing. If the mark does not stand here, its parts that
        do are consumed. An empty mark is always found.
        """
        for part in mark.split():
            yield from self.skip_space()
            if not (yield from self.at_mark(part)):
                return False
            self.take(len(part))
        return True


@lru_cache(maxsize=256)
def marks_of(*marks: str) -> "Marks":
    """Return a search for the marks, which is compiled once for all answers."""
    return Marks(marks)


class Marks:
    """Search for several marks at once. Empty marks are ignored."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.all = tuple(sorted({mark for mark in marks if mark}, key=len, reverse=True))
        firsts = "".join(sorted({mark[0] for mark in self.all}))
        self._longest = len(self.all[0]) if self.all else 0
        # A pattern that matches nothing, if there are no marks.
        self._any = re.compile("|".join(map(re.escape, self.all)) if self.all else r"(?!)")
        self._first = re.compile(f"[{re.escape(firsts)}]" if firsts else r"(?!)")

    def may_begin_in(self, text: str) -> bool:
        """Return whether the first character of a mark stands in the text."""
        return self._first.search(text) is not None

    def find(self, source: AnswerInput) -> tuple[int, str]:
        """Return how many characters stand before a mark, and the mark.

        If there is no whole mark, or it can still become a longer one, the mark is empty, and the
        characters are those that are certainly not part of a mark.
        """
        text, at = source.text, source.at
        match = self._any.search(text, at)
        end = match.start() if match else len(text)
        if not source.is_ended:
            for first in self._first.finditer(text, max(at, len(text) - self._longest + 1), end):
                if self._can_begin(text[first.start() :]):
                    return first.start() - at, ""
        if match is None:
            return end - at, ""
        if not source.is_ended and self._can_begin(text[end : end + self._longest]):
            return end - at, ""
        return end - at, match.group()

    def can_begin_with_rest(self, source: AnswerInput) -> bool:
        """Return whether the text that is not consumed is a prefix of a mark."""
        return self._can_begin(source.text[source.at : source.at + self._longest])

    def _can_begin(self, text: str) -> bool:
        """Return whether a mark begins with the text and is longer."""
        return any(len(mark) > len(text) and mark.startswith(text) for mark in self.all)

    def copy_before(self, source: AnswerInput, write: Write | None = None) -> Steps[str]:
        """Consume the text before the next mark, write it, and return the mark, not consumed."""
        while True:
            length, mark = self.find(source)
            if length:
                text = source.take(length)
                if write is not None:
                    write(text)
            if mark:
                return mark
            yield from source.more()

    def here(self, source: AnswerInput) -> Steps[str]:
        """Return the mark that stands here, not consumed; empty if none does."""
        while True:
            text = source.text[source.at : source.at + self._longest]
            if not source.is_ended and self._can_begin(text):
                yield from source.more()
                continue
            return next((mark for mark in self.all if text.startswith(mark)), "")


def first_part(mark: str) -> str:
    """Return the part of a mark before its first whitespace; empty if the mark is whitespace."""
    return next(iter(mark.split()), "")


def stripped(*marks: str) -> list[str]:
    """Return the marks that are not empty, without the whitespace at their ends."""
    return [mark.strip() for mark in marks if mark.strip()]


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


class StepRunner:
    """Continue the steps of a parser whenever a piece of its input has arrived.

    Args:
        source: the input that the steps read.
        steps: the steps, which have not begun.

    Attributes:
        is_done: the steps have ended.
    """

    def __init__(self, source: AnswerInput, steps: Steps[None]) -> None:
        self._source = source
        self._steps = steps
        self.is_done = False

    def push(self, text: str) -> None:
        """Append a piece to the input and run the steps until they need more."""
        self._source.push(text)
        self._advance()

    def finish(self) -> None:
        """End the input and run the steps to their end."""
        self._source.is_ended = True
        self._advance()

    def _advance(self) -> None:
        if not self.is_done:
            self.is_done = next(self._steps, True) is True


class AnswerParser(ABC):
    """Parse an answer piece by piece, however it is cut into pieces.

    The parser is a generator of steps. Pieces of plain text are copied without a step.

    Args:
        source: the answer.
        writer: takes the events.
    """

    def __init__(self, source: AnswerInput, writer: EventWriter) -> None:
        self._source = source
        self._writer = writer
        self._copied: tuple[Marks, TextSink] | None = None
        self._runner = StepRunner(source, self._answer())

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended at a call that repeats an earlier one."""
        return self._writer.is_over

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the answer and return what is certain now."""
        if self._copied is not None and not self._source.has_rest:
            marks, sink = self._copied
            if sink.is_plain(text, marks):
                return [sink.kind(text)]
        self._runner.push(text)
        return self._writer.take()

    def finish(self) -> list[AnswerEvent]:
        """Return the rest; nothing may be pushed afterwards."""
        self._runner.finish()
        return self._writer.take()

    @abstractmethod
    def _answer(self) -> Steps[None]:
        """Parse the answer to its end and write its events."""

    def _copy(self, marks: Marks, sink: TextSink) -> Steps[str]:
        """Copy text up to a mark, which is not consumed, and return the mark."""
        self._copied = (marks, sink)
        mark = yield from marks.copy_before(self._source, sink.write)
        self._copied = None
        return mark
