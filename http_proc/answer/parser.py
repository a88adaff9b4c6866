"""The contract of the parser of answers, and the parser for a format."""

from typing import Protocol

from http_proc.answer.calls import CallsParser
from http_proc.answer.event_writer import EventWriter
from http_proc.answer.events import AnswerEvent, ParsedAnswer
from http_proc.answer.marked import MarkedAnswerParser
from http_proc.answer.marks import AnswerInput
from http_proc.answer.styles.call_context import CallContext
from http_proc.answer.styles.harmony import HarmonyParser
from http_proc.answer.tool_schemas import ToolSchemas
from quadriga.answer_format import AnswerFormat, CallStyle

__all__ = ["AnswerParser", "ToolSchemas", "make_parser", "parse_answer"]


class AnswerParser(Protocol):
    """Parse one answer, piece by piece, however it is cut into pieces."""

    @property
    def is_over(self) -> bool:
        """Whether the answer has ended at a call that repeats an earlier one."""

    def push(self, text: str) -> list[AnswerEvent]:
        """Take the next piece of the answer and return what is certain now."""

    def finish(self) -> list[AnswerEvent]:
        """Return the rest; nothing may be pushed afterwards."""


def make_parser(
    answer_format: AnswerFormat,
    *,
    tools: ToolSchemas | None = None,
    begins_in_reasoning: bool = False,
    parses_reasoning: bool = True,
    max_calls: int | None = None,
    ends_at_repeat: bool = False,
    takes_unmarked: bool = False,
) -> AnswerParser:
    """Return a parser for one answer.

    Args:
        answer_format: how the model marks reasoning and calls.
        tools: the tools of the request; None or empty: calls are text.
        begins_in_reasoning: the prompt ends within the reasoning.
        parses_reasoning: separate the reasoning from the text. Otherwise it is part of the text,
            with its marks; marks of calls within it still begin no call.
        max_calls: number of calls after which further ones are dropped; None: no limit.
        ends_at_repeat: a call that repeats an earlier one ends the answer, and is dropped.
        takes_unmarked: a JSON object without the marks of calls is a call of a tool of the request
            if it has the form of one. False for an answer that a grammar makes.
    """
    source, writer = AnswerInput(), EventWriter(max_calls, ends_at_repeat)
    calls = answer_format.calls
    if calls is not None and calls.style is CallStyle.HARMONY:
        return HarmonyParser(source, writer, tools, begins_in_reasoning, parses_reasoning)
    calls_parser = None
    if calls is not None and tools:
        calls_parser = CallsParser(CallContext(source, writer, calls, tools), takes_unmarked)
    return MarkedAnswerParser(
        source,
        writer,
        answer_format.reasoning,
        calls_parser,
        begins_in_reasoning,
        parses_reasoning,
    )


def parse_answer(parser: AnswerParser, text: str) -> ParsedAnswer:
    """Parse a whole answer at once."""
    answer = ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer
