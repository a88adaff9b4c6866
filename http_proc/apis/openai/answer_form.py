"""The form in which a request wants reasoning and calls in messages and deltas."""

from dataclasses import dataclass
from typing import Any

from http_proc.answer.events import CallBegin, ParsedAnswer
from http_proc.protocol.schema import AnswerMessage, ChatRequest, FunctionCall, ToolCall


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a message has beside its text.

    Attributes:
        has_reasoning: it has the reasoning, under both of the names that clients read.
        has_functions: its call is in OpenAI's older form: one function_call, without an id.
    """

    has_reasoning: bool = True
    has_functions: bool = False

    @classmethod
    def of(cls, fields: ChatRequest) -> "AnswerForm":
        """Return the form for which a request asks."""
        return cls(fields.include_reasoning, fields.functions is not None)

    def message(self, parsed: ParsedAnswer) -> AnswerMessage:
        """Return a whole message."""
        message = AnswerMessage(parsed.text or (None if parsed.calls else ""))
        calls = [
            ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in parsed.calls
        ]
        if self.has_functions and calls:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        if self.has_reasoning and parsed.reasoning:
            message.reasoning_content = message.reasoning = parsed.reasoning
        return message

    def finish_reason(self, reason: str) -> str:
        """Return a finish_reason by its name in this form."""
        return "function_call" if self.has_functions and reason == "tool_calls" else reason

    def reasoning(self, text: str) -> dict[str, Any] | None:
        """Return the delta of a piece of the reasoning, if there is one."""
        return {"reasoning_content": text, "reasoning": text} if self.has_reasoning else None

    def call_begin(self, index: int, begin: CallBegin) -> dict[str, Any]:
        """Return the delta of a call that begins."""
        function = {"name": begin.name, "arguments": ""}
        if self.has_functions:
            return {"function_call": function}
        call = {"index": index, "id": begin.id, "type": "function", "function": function}
        return {"tool_calls": [call]}

    def arguments(self, index: int, text: str) -> dict[str, Any]:
        """Return the delta of a piece of the arguments of a call."""
        function = {"arguments": text}
        if self.has_functions:
            return {"function_call": function}
        return {"tool_calls": [{"index": index, "function": function}]}
