"""Tool calls in what a model writes, found while it is being written.

Three formats are known: Hermes and Qwen (<tool_call>{"name", "arguments"}</tool_call>), Mistral
([TOOL_CALLS] before a list of such objects, or before name{arguments}), and Llama 3 (the answer is
one object {"name", "parameters"}, or several with semicolons). What turns out to be no call is
text, and is given back unchanged.
"""

import json
import re
import secrets
import string
from typing import Any, NamedTuple, Protocol

from http_proc.protocol.schema import FunctionCall, ToolCall

_decoder = json.JSONDecoder()
_ID_ALPHABET = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Mistral's templates take no other length."""


class ParsedCalls(NamedTuple):
    """Text of the answer, and the calls that were completed."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Takes one answer, piece by piece."""

    def push(self, text: str) -> ParsedCalls:
        """What is certain now."""

    def finish(self) -> ParsedCalls:
        """The rest; nothing may be pushed afterwards."""


def make_parser(tool_format: str) -> ToolCallParser:
    """tool_format: hermes, mistral or llama3."""
    parsers: dict[str, type[ToolCallParser]] = {
        "hermes": HermesParser,
        "mistral": MistralParser,
        "llama3": Llama3Parser,
    }
    return parsers[tool_format]()


class HermesParser:
    """Calls stand between tags, anywhere in the text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._called = False

    def push(self, text: str) -> ParsedCalls:
        self._held += text
        out = ""
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                before, tag, after = self._held.partition(self.OPEN)
                if not tag:
                    kept = _possible_beginning(before, self.OPEN)
                    self._held = before[len(before) - kept :]
                    return ParsedCalls(
                        out + self._between(before[: len(before) - kept]), tuple(calls)
                    )
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
                self._called = True
            self._held, self._inside = after, False

    def finish(self) -> ParsedCalls:
        """A call that lacks nothing but its closing tag is a call."""
        call = _call(_load(self._held)) if self._inside else None
        if call is not None:
            return ParsedCalls(calls=(call,))
        return ParsedCalls(self.OPEN + self._held if self._inside else self._between(self._held))

    def _between(self, text: str) -> str:
        """The line breaks around calls are no text."""
        return "" if self._called and not text.strip() else text


class MistralParser:
    """Everything after the mark is calls."""

    MARK = "[TOOL_CALLS]"
    _NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{)")

    def __init__(self) -> None:
        self._held = ""
        self._inside = False

    def push(self, text: str) -> ParsedCalls:
        self._held += text
        if self._inside:
            return self._calls() if "}" in text or "]" in text else ParsedCalls()
        before, mark, after = self._held.partition(self.MARK)
        if mark:
            self._held, self._inside = after, True
            return ParsedCalls(before, self._calls().calls)
        kept = _possible_beginning(before, self.MARK)
        self._held = before[len(before) - kept :]
        return ParsedCalls(before[: len(before) - kept])

    def _calls(self) -> ParsedCalls:
        """The calls that are complete; what is not stays held."""
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
            found = [_call(item) for item in (value if isinstance(value, list) else [value])]
            if not found or None in found:
                break
            calls += [call for call in found if call is not None]
            self._held = held[(named.end() if named else 0) + length :]
        return ParsedCalls(calls=tuple(calls))

    def finish(self) -> ParsedCalls:
        if not self._inside:
            return ParsedCalls(self._held)
        return ParsedCalls(self.MARK + self._held if self._held.strip() else "")


class Llama3Parser:
    """The whole answer is calls, or it is text; its first character tells."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._held = ""
        self._is_text = False
        self._called = False

    def push(self, text: str) -> ParsedCalls:
        if self._is_text:
            return ParsedCalls(text)
        self._held += text
        return self._settle("}" in text)

    def _settle(self, may_be_complete: bool) -> ParsedCalls:
        start = self._held.lstrip()
        if start.startswith(self.TAG):
            start = self._held = start[len(self.TAG) :].lstrip()
        if not self._called and start and start[0] != "{" and not self.TAG.startswith(start):
            self._is_text = True
            text, self._held = self._held, ""
            return ParsedCalls(text)
        return self._calls() if may_be_complete else ParsedCalls()

    def _calls(self) -> ParsedCalls:
        calls: list[ToolCall] = []
        while True:
            rest = self._held.lstrip("; \n\t\r") if self._called else self._held.lstrip()
            parsed = _load_first(rest)
            call = _call(parsed[0]) if parsed else None
            if parsed is None or call is None:
                return ParsedCalls(calls=tuple(calls))
            calls.append(call)
            self._called = True
            self._held = rest[parsed[1] :]

    def finish(self) -> ParsedCalls:
        left = self._held
        return ParsedCalls("" if self._called and not left.strip("; \n\t\r") else left)


def _possible_beginning(text: str, tag: str) -> int:
    """How many characters at the end of the text may be the beginning of the tag."""
    longest = min(len(text), len(tag) - 1)
    return next((n for n in range(longest, 0, -1) if tag.startswith(text[-n:])), 0)


def _load(text: str) -> Any:
    """A JSON value, or None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _load_first(text: str) -> tuple[Any, int] | None:
    """The JSON value at the beginning of the text, and its length; None where it is not whole."""
    try:
        return _decoder.raw_decode(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    """The call that an object says; None where it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(_new_id(), FunctionCall(value["name"], arguments))


def _new_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(ID_LENGTH))
