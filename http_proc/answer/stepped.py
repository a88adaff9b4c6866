"""Run a parser that is a generator of steps on the pieces of its input."""

from abc import ABC, abstractmethod

from http_proc.answer.event_writer import EventWriter
from http_proc.answer.events import AnswerEvent
from http_proc.answer.marks import AnswerInput, Marks, Steps
from http_proc.answer.sinks import TextSink


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


class SteppedParser(ABC):
    """Parse an answer in steps. Pieces of plain text are copied without a step.

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
