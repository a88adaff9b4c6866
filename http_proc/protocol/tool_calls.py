"""Parse tool calls out of a model's answer while it is generated.

Three formats are supported: Hermes and Qwen (<tool_call>{"name", "arguments"}</tool_call>), Mistral
([TOOL_CALLS] before a list of such objects, or before name{arguments}), and Llama 3 (the answer is
one object {"name", "parameters"}, or several separated by semicolons). Anything that turns out not
to be a call stays text, unchanged.
"""

import json
import re
import secrets
import string
from enum import Enum
from typing import Any, NamedTuple, Protocol

from http_proc.protocol.schema import FunctionCall, ToolCall

_decoder = json.JSONDecoder()
_ID_ALPHABET = string.ascii_letters + string.digits
ID_LENGTH = 9  # the only length that Mistral's templates accept


class ToolFormat(Enum):
    """How a model writes tool calls, by the name in the server's info."""

    HERMES = "hermes"
    MISTRAL = "mistral"
    LLAMA3 = "llama3"


class ParsedCalls(NamedTuple):
    """Text of the answer, and the calls that are complete."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Parse one answer, piece by piece."""

    def push(self, text: str) -> ParsedCalls:
        """Take the next piece and return what is certain now."""

    def finish(self) -> ParsedCalls:
        """Return the rest; nothing may be pushed afterwards."""


def make_parser(tool_format: ToolFormat) -> ToolCallParser:
    """Return a parser for one answer."""
    parsers: dict[ToolFormat, type[ToolCallParser]] = {
        ToolFormat.HERMES: HermesParser,
        ToolFormat.MISTRAL: MistralParser,
        ToolFormat.LLAMA3: Llama3Parser,
    }
    return parsers[tool_format]()


def split_calls(text: str, tool_format: ToolFormat | None) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a whole answer."""
    if tool_format is None:
        return text, []
    parser = make_parser(tool_format)
    parts = [parser.push(text), parser.finish()]
    return "".join(part.text for part in parts), [call for part in parts for call in part.calls]


class HermesParser:
    """Parse calls between tags, anywhere in the text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._has_called = False

    def push(self, text: str) -> ParsedCalls:
        """Return the text outside of tags, and the calls whose closing tag has arrived."""
        self._held += text
        out = ""
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                before, tag, after = self._held.partition(self.OPEN)
                if not tag:
                    end = len(before) - _partial_tag_length(before, self.OPEN)
                    self._held = before[end:]
                    return ParsedCalls(out + self._between(before[:end]), tuple(calls))
                out += self._between(before)
                self._held, self._inside = after, True
            body, tag, after = self._held.partition(self.CLOSE)
            if not tag:
                return ParsedCalls(out, tuple(calls))
            call = _call(_load(body))
            if call is None:
                out += self.OPEN + body + self.CLOSE
            else:
                calls.append(call)
                self._has_called = True
            self._held, self._inside = after, False

    def finish(self) -> ParsedCalls:
        """Return the rest; a call may lack its closing tag."""
        call = _call(_load(self._held)) if self._inside else None
        if call is not None:
            return ParsedCalls(calls=(call,))
        return ParsedCalls(self.OPEN + self._held if self._inside else self._between(self._held))

    def _between(self, text: str) -> str:
        """Drop the whitespace between calls."""
        return "" if self._has_called and not text.strip() else text


class MistralParser:
    """Parse calls after the mark; nothing after it is text."""

    MARK = "[TOOL_CALLS]"
    _NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)")

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str) -> ParsedCalls:
        """Return the text before the mark, and the calls that are complete."""
        self._held += text
        if self._inside:
            return self._calls() if "}" in text or "]" in text else ParsedCalls()
        before, mark, after = self._held.partition(self.MARK)
        if mark:
            self._held, self._inside = after, True
            return ParsedCalls(before, self._calls().calls)
        end = len(before) - _partial_tag_length(before, self.MARK)
        self._held = before[end:]
        return ParsedCalls(before[:end])

    def _calls(self) -> ParsedCalls:
        """Remove the complete calls from the held text and return them."""
        calls: list[ToolCall] = []
        while self._held:
            held = self._held.lstrip().removeprefix(self.MARK).lstrip()
            named = self._NAME.match(held)
            parsed = _load_first(held[named.end() :] if named else held)
            if parsed is None:
                break
            value, length = parsed
            if named:
                value = {"name": named[1], "arguments": value}
            items = [_call(item) for item in (value if isinstance(value, list) else [value])]
            if not items or None in items:
                break
            calls += [call for call in items if call is not None]
            self._held = held[(named.end() if named else 0) + length :]
        return ParsedCalls(calls=tuple(calls))

    def finish(self) -> ParsedCalls:
        """Return the held text, with the mark if it is not a call."""
        if not self._inside:
            return ParsedCalls(self._held)
        return ParsedCalls(self.MARK + self._held if self._held.strip() else "")


class Llama3Parser:
    """Parse an answer that is calls if its first character is a brace, else text."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False
        self._has_called = False

    def push(self, text: str) -> ParsedCalls:
        """Return the piece if the answer is text, else the calls that are complete."""
        if self._is_text:
            return ParsedCalls(text)
        self._held += text
        start = self._held.lstrip()
        if start.startswith(self.TAG):
            start = self._held = start[len(self.TAG) :].lstrip()
        if not self._has_called and start and start[0] != "{" and not self.TAG.startswith(start):
            self._is_text = True
            text, self._held = self._held, ""
            return ParsedCalls(text)
        return self._calls() if "}" in text else ParsedCalls()

    def _calls(self) -> ParsedCalls:
        calls: list[ToolCall] = []
        while True:
            rest = self._held.lstrip("; \n\t\r") if self._has_called else self._held.lstrip()
            parsed = _load_first(rest)
            call = _call(parsed[0]) if parsed else None
            if parsed is None or call is None:
                return ParsedCalls(calls=tuple(calls))
            calls.append(call)
            self._has_called = True
            self._held = rest[parsed[1] :]

    def finish(self) -> ParsedCalls:
        """Return the held text, without separators after a call."""
        rest = self._held
        return ParsedCalls("" if self._has_called and not rest.strip("; \n\t\r") else rest)


def _partial_tag_length(text: str, tag: str) -> int:
    """Return how many characters at the end of the text may be the beginning of the tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)


def _load(text: str) -> Any:
    """Return a JSON value, or None if the text is not one."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _load_first(text: str) -> tuple[Any, int] | None:
    """Return the JSON value that the text begins with, and its length, or None."""
    try:
        return _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    """Return the call that a decoded object describes, or None."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_new_id(), FunctionCall(value["name"], arguments))


def _new_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH))
