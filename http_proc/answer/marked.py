"""Parse an answer whose reasoning and calls stand between marks."""

import re

from http_proc.answer.calls import CallsParser
from http_proc.answer.event_writer import EventWriter
from http_proc.answer.marks import AnswerInput, EndOfAnswer, Steps, marks_of, stripped
from http_proc.answer.sinks import ReasoningSink, TextAroundCalls, TextSink
from http_proc.answer.stepped import SteppedParser
from quadriga.answer_format import ReasoningFormat

_NEWLINES = re.compile(r"[\r\n]*")
_NO_REASONING = ReasoningFormat(open="", close="")


class MarkedAnswerParser(SteppedParser):
    """Parse reasoning at the beginning of an answer, then text and calls.

    Args:
        source: the answer.
        writer: takes the events.
        reasoning: marks of the reasoning; None: the format has no reasoning.
        calls: parser of the calls; None: calls are text.
        begins_in_reasoning: the prompt ends within the reasoning.
        parses_reasoning: write reasoning as reasoning; otherwise as text, with its marks.
    """

    def __init__(
        self,
        source: AnswerInput,
        writer: EventWriter,
        reasoning: ReasoningFormat | None,
        calls: CallsParser | None,
        begins_in_reasoning: bool,
        parses_reasoning: bool,
    ) -> None:
        super().__init__(source, writer)
        self._calls = calls
        marks = reasoning or _NO_REASONING
        self._opens = marks_of(*stripped(marks.open, *marks.open_variants))
        self._closes = marks_of(*stripped(marks.close, *marks.close_variants))
        self._begins_in_reasoning = begins_in_reasoning and bool(self._closes.all)
        self._parses_reasoning = parses_reasoning
        dropped = stripped(marks.text_open, marks.text_close) if parses_reasoning else []
        self._text_marks = marks_of(*dropped, *(calls.triggers.all if calls else ()))
        self._dropped = frozenset(dropped)
        self._text = TextAroundCalls(writer) if calls else TextSink(writer)

    def _answer(self) -> Steps[None]:
        try:
            space = yield from self._reasoning()
            yield from self._answer_proper(space)
        except EndOfAnswer:
            pass
        self._text.finish()

    # --- the reasoning ------------------------------------------------------------------------

    def _reasoning(self) -> Steps[str]:
        """Parse the reasoning and return the whitespace before an answer that has none."""
        space = yield from self._space_before_answer()
        mark = yield from self._opens.here(self._source)
        if not mark and not self._begins_in_reasoning:
            return space
        self._source.take(len(mark))
        if not self._parses_reasoning:
            raw = TextSink(self._writer)
            raw.write(space + mark)
            raw.write(self._source.take(len((yield from self._copy(self._closes, raw)))))
            return ""
        yield from self._skip_newlines()
        close = yield from self._copy(self._closes, ReasoningSink(self._writer))
        self._source.take(len(close))
        yield from self._skip_newlines()
        return ""

    def _space_before_answer(self) -> Steps[str]:
        """Consume and return the whitespace that may stand before the reasoning."""
        if not self._opens.all:
            return ""
        pieces: list[str] = []
        try:
            yield from self._source.skip_space(pieces.append)
        except EndOfAnswer:
            if not (self._begins_in_reasoning and self._parses_reasoning):
                self._writer.text("".join(pieces))
            raise
        return "".join(pieces)

    def _skip_newlines(self) -> Steps[None]:
        while True:
            self._source.take_match(_NEWLINES)
            if self._source.at < len(self._source.text):
                return
            yield from self._source.more()

    # --- text and calls -----------------------------------------------------------------------

    def _answer_proper(self, space: str) -> Steps[None]:
        """Parse the text and the calls after the reasoning; the whitespace belongs to the text."""
        self._text.write(space)
        calls = self._calls
        if calls is not None and calls.first_characters:
            char = yield from self._source.skip_space(self._text.write)
            if char in calls.first_characters:
                yield from self._parse_calls("", calls)
        while True:
            mark = yield from self._copy(self._text_marks, self._text)
            if calls is None or mark in self._dropped:
                self._source.take(len(mark))
            else:
                yield from self._parse_calls(mark, calls)

    def _parse_calls(self, mark: str, calls: CallsParser) -> Steps[None]:
        """Parse calls that begin at a mark, and write as text what turns out to be none."""
        num_calls = self._writer.num_calls
        rest = yield from calls.parse(mark)
        if self._writer.num_calls > num_calls:
            self._text.after_calls()
        self._text.write(rest)
