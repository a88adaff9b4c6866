"""Probes of a chat template: chats with known words, whose places in the prompt show the marks.

In this order: the chats and the `Prober` that renders them, the styles of tool calls (one function
for each), and the marks of tool calls (`derive_calls`).
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from quadriga.server.answer_format import CallFormat, CallStyle, ReasoningFormat
from tokenizer_proc.preparation.templates.sandbox import TemplateRanAway

USER = "Quprobe?"
CONTENT = "Conprobe."
REASONING = "Reaprobe."
NAMES = ("nprobea", "nprobeb")
KEYS = ("kprobea", "kprobeb")
VALUES = ("Vprobe", 4711)
RESULT = "Resprobe"
# Mistral's templates take only ids of this form.
IDS = ("aProbe001", "bProbe002")

# The variables by which templates turn the reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
# The fields in which templates look for an assistant's reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Message = dict[str, Any]
Render = Callable[[dict[str, Any]], str]


def tool(name: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    properties = {
        KEYS[0]: {"type": "string", "description": "A text."},
        KEYS[1]: {"type": "integer", "description": "A number."},
    }
    parameters = {"type": "object", "properties": properties, "required": [*KEYS]}
    function = {"name": name, "description": "A probe.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool(name) for name in NAMES]


def user() -> Message:
    """Return the turn that every probe begins with."""
    return {"role": "user", "content": USER}


def assistant(content: str = CONTENT, **fields: Any) -> Message:
    """Return an assistant's turn."""
    return {"role": "assistant", "content": content, **fields}


def calls(arguments: Any, num_calls: int) -> list[dict[str, Any]]:
    """Return tool calls with the same arguments."""
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id_, name in zip(IDS[:num_calls], NAMES[:num_calls], strict=True)
    ]


def results(num_calls: int) -> list[Message]:
    """Return the answers of tools to calls."""
    return [
        {"role": "tool", "content": RESULT, "name": name, "tool_call_id": id_}
        for id_, name in zip(IDS[:num_calls], NAMES[:num_calls], strict=True)
    ]


@dataclass(slots=True)
class Prober:
    """Renders probes with one template, until the first that runs away.

    Args:
        render: renders the template's variables; raises whatever the template raises.
    """

    render: Render
    has_run_away: bool = False

    def text(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        asks: bool = False,
        variables: dict[str, Any] | None = None,
    ) -> str | None:
        """Return the prompt, or None where the template refuses the chat.

        Args:
            messages: the chat.
            tools: functions in OpenAI's form.
            asks: end with the beginning of the assistant's next turn.
            variables: further variables of the template.
        """
        if self.has_run_away:
            return None
        chat = {"messages": messages, "tools": tools, "add_generation_prompt": asks}
        try:
            return self.render((variables or {}) | chat)
        except TemplateRanAway:
            self.has_run_away = True
            return None
        except Exception:  # a template is a program: it may fail in any way
            return None


# Recognise how a rendered call is written: one function for each style of calls.

ARGUMENTS = dict(zip(KEYS, VALUES, strict=True))
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call in a rendered turn.

    Attributes:
        start: position of the first character of the call proper: of its JSON object, or its name.
        end: position after the last character.
        marks: the fields of CallFormat that stand within the call.
    """

    style: CallStyle
    start: int
    end: int
    marks: dict[str, Any] = field(default_factory=dict)


def find_call(text: str, name: str) -> FoundCall | None:
    """Return the call of a function in a turn; None if it is written in no known style."""
    at = text.find(name)
    if at < 0:
        return None
    return next(filter(None, (find(text, name, at) for find in _FINDERS)), None)


def _find_json(text: str, name: str, at: int) -> FoundCall | None:
    for start in _braces_before(text, at):
        decoded = _decode(text, start)
        if decoded is None:
            continue
        value, end = decoded
        keys = _keys(value, name)
        if keys is not None and end > at:
            return FoundCall(CallStyle.JSON, start, end, keys)
    return None


def _keys(value: Any, name: str) -> dict[str, str] | None:
    """Return the keys of name and arguments, if the object is a call."""
    if not isinstance(value, dict):
        return None
    arguments = next((key for key, item in value.items() if _is_arguments(item)), None)
    if arguments == name:
        return {"name_key": ""}
    name_key = next((key for key, item in value.items() if item == name), None)
    if name_key is None or arguments is None:
        return None
    return {"name_key": name_key, "arguments_key": arguments}


def _is_arguments(value: Any) -> bool:
    if isinstance(value, str):
        decoded = _decode(value, 0)
        value = decoded and decoded[0]
    return bool(value == ARGUMENTS)


def _find_named_json(text: str, name: str, at: int) -> FoundCall | None:
    after = at + len(name)
    start = text.find("{", after)
    decoded = _decode(text, start) if start >= 0 else None
    if decoded is None or not _is_arguments(decoded[0]):
        return None
    marks = {"name_close": text[after:start]}
    for id_ in IDS:
        before, found, rest = marks["name_close"].partition(id_)
        if found:
            marks = {"id_open": before, "name_close": rest}
    return FoundCall(CallStyle.NAMED_JSON, at, decoded[1], marks)


_PYTHONIC = re.compile(rf"\({KEYS[0]}=(['\"]){VALUES[0]}\1,\s*{KEYS[1]}={VALUES[1]}\)")
_QUOTED = re.compile(rf"\{{{KEYS[0]}:(.+?){VALUES[0]}\1,\s*{KEYS[1]}:{VALUES[1]}\}}")


def _find_pythonic(text: str, name: str, at: int) -> FoundCall | None:
    found = _PYTHONIC.match(text, at + len(name))
    return FoundCall(CallStyle.PYTHONIC, at, found.end()) if found else None


def _find_quoted(text: str, name: str, at: int) -> FoundCall | None:
    found = _QUOTED.match(text, at + len(name))
    return FoundCall(CallStyle.QUOTED, at, found.end(), {"quote": found[1]}) if found else None


def _find_tagged(text: str, name: str, at: int) -> FoundCall | None:
    ends = [at + len(name)]
    gaps = []
    for word in (KEYS[0], str(VALUES[0]), KEYS[1], str(VALUES[1])):
        place = text.find(word, ends[-1])
        if place < 0:
            return None
        gaps.append(text[ends[-1] : place])
        ends.append(place + len(word))
    before_first, string_key_close, before_second, key_close = gaps
    key_open = _last_tag(common_suffix(before_first, before_second))
    value_close = before_second.removesuffix(key_open)
    if not (key_open and key_close.strip() and value_close.strip()):
        return None
    if text.startswith(value_close.rstrip(), ends[-1]):
        end = ends[-1] + len(value_close.rstrip())
    else:
        return None
    marks = {
        "name_close": before_first.removesuffix(key_open),
        "key_open": key_open,
        "key_close": key_close,
        "value_close": value_close.rstrip(),
    }
    if string_key_close != key_close:
        marks["string_key_close"] = string_key_close
    return FoundCall(CallStyle.TAGGED, at, end, marks)


_FINDERS: tuple[Callable[[str, str, int], FoundCall | None], ...] = (
    _find_json,
    _find_named_json,
    _find_pythonic,
    _find_quoted,
    _find_tagged,
)


def common_prefix(first: str, second: str) -> str:
    """Return the longest text with which both texts begin, without a part of a tag at its end."""
    text = first[: _num_equal(first, second)]
    is_cut = text.rfind("<") > text.rfind(">") and text not in (first, second)
    return text[: text.rfind("<")] if is_cut else text


def common_suffix(first: str, second: str) -> str:
    """Return the longest text with which both texts end, without a part of a tag before it."""
    text = first[len(first) - _num_equal(first[::-1], second[::-1]) :]
    before = first.removesuffix(text)
    is_cut = before.rfind("<") > before.rfind(">") and ">" in text
    return text[text.find(">") + 1 :] if is_cut else text


def _num_equal(first: str, second: str) -> int:
    """Return the number of characters with which both texts begin."""
    pairs = zip(first, second, strict=False)
    length = min(len(first), len(second))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), length)


def _last_tag(text: str) -> str:
    """Return a text from its last tag on, or without leading whitespace if it has no tag."""
    start = max(text.rfind("<"), text.rfind("["))
    return text[start:] if start >= 0 else text.lstrip()


def _braces_before(text: str, at: int) -> Iterator[int]:
    """Yield the positions of opening braces before a position, the nearest first."""
    while (at := text.rfind("{", 0, at)) >= 0:
        yield at


def _decode(text: str, start: int) -> tuple[Any, int] | None:
    """Return the JSON value at a position and the position after it."""
    try:
        return _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


# Find the marks of tool calls: render calls with known words, and read what stands around them.

MAX_MARK_CHARS = 200


class CallsFound(NamedTuple):
    """What a template shows of the way in which calls are written.

    Attributes:
        is_shown: the template writes the calls of an assistant's turn.
        style: the style of one call, if it is known.
        calls: the marks; None where they are not certain.
    """

    is_shown: bool = False
    style: CallStyle | None = None
    calls: CallFormat | None = None


class _Around(NamedTuple):
    """The text around the calls of one turn: before, between and after them."""

    before: str
    between: str
    after: str


def derive_calls(prober: Prober, arguments: Any, end_marks: tuple[str, ...]) -> CallsFound:
    """Return how calls are written, as far as the template shows it.

    Args:
        prober: renders the template.
        arguments: call_styles.ARGUMENTS, or their JSON text if the template takes text.
        end_marks: tokens that end a turn, which no answer has as text.
    """
    one = render_calls(prober, arguments, end_marks, 1)
    if one is None:
        return CallsFound()
    call = find_call(one, NAMES[0])
    if call is None:
        return CallsFound(is_shown=True)
    two = render_calls(prober, arguments, end_marks, 2)
    if two is None:
        return _found(_make_format(call, one[: call.start], "", "", "", one[call.end :]))
    around = _around_two(two, call)
    return CallsFound(True, call.style) if around is None else _found(_divide(call, around))


def _found(calls: CallFormat) -> CallsFound:
    return CallsFound(True, calls.style, calls if _is_certain(calls) else None)


def _divide(call: FoundCall, around: _Around) -> CallFormat:
    call_open = common_suffix(around.before, around.between)
    rest = around.between.removesuffix(call_open)
    call_close = common_prefix(rest, around.after)
    opening, close = around.before.removesuffix(call_open), around.after.removeprefix(call_close)
    return _make_format(call, opening, call_open, call_close, rest[len(call_close) :], close)


def _is_certain(calls: CallFormat) -> bool:
    """Return whether the marks can begin calls and hold nothing of the probes."""
    texts = texts_of(calls)
    opening = calls.open + calls.call_open + calls.name_open
    if not opening and calls.style not in (CallStyle.JSON, CallStyle.PYTHONIC):
        return False
    if any(word in text for text in texts for word in (*NAMES, *KEYS, *IDS)):
        return False
    return max(map(len, texts), default=0) <= MAX_MARK_CHARS


def texts_of(part: CallFormat | ReasoningFormat) -> list[str]:
    """Return the marks and keys of a format that are not empty."""
    values = msgspec.structs.asdict(part)
    texts = [value for value in values.values() if isinstance(value, str)]
    lists = [value for value in values.values() if isinstance(value, tuple)]
    return [text for text in [*texts, *(item for items in lists for item in items)] if text]


def render_calls(
    prober: Prober, arguments: Any, end_marks: tuple[str, ...], num_calls: int
) -> str | None:
    """Return what the model wrote in a turn of calls; None where the template does not show it.

    Args:
        prober: renders the template.
        arguments: the calls' arguments as the template takes them.
        end_marks: tokens that end a turn, which no answer has as text.
        num_calls: 1 or 2.
    """
    turn = assistant("", tool_calls=calls(arguments, num_calls))
    text = prober.text([user(), turn], TOOLS)
    if text is None:
        text = prober.text([user(), turn, *results(num_calls)], TOOLS)
    asked = prober.text([user()], TOOLS, asks=True)
    plain = prober.text([user(), assistant()], TOOLS)
    if text is None or (asked is None and plain is None):
        return None
    begin, _, end = (plain or "").rpartition(CONTENT)
    start = (
        len(begin) if plain and text.startswith(begin) else len(common_prefix(text, asked or ""))
    )
    if any(text.find(name, start) < 0 for name in NAMES[:num_calls]):
        return None
    return _without_end(text[start:], text.rfind(NAMES[num_calls - 1]) - start, end, end_marks)


def _without_end(turn: str, name_at: int, end: str, end_marks: tuple[str, ...]) -> str:
    """Cut a turn where it ends: at a token that ends turns, or before the end of a plain turn."""
    places = [place for mark in end_marks if mark and (place := turn.find(mark, name_at)) >= 0]
    if places:
        return turn[: min(places)]
    if end.strip() and turn.endswith(end):
        return turn.removesuffix(end)
    place = turn.find(end.strip(), name_at) if end.strip() else -1
    return turn[:place] if place >= 0 else turn


def _around_two(turn: str, call: FoundCall) -> _Around | None:
    """Return the text around two calls that are written like another call; None if they differ."""
    first, second = (find_call(turn, name) for name in NAMES)
    if first is None or second is None or not first.end <= second.start:
        return None
    if not call.marks == first.marks == second.marks:
        return None
    return _Around(turn[: first.start], turn[first.end : second.start], turn[second.end :])


def _make_format(
    call: FoundCall, opening: str, call_open: str, call_close: str, separator: str, close: str
) -> CallFormat:
    """Return the format. Marks that stand around each call, and not around all, are its section."""
    if call.style in (CallStyle.JSON, CallStyle.PYTHONIC):
        is_list = opening.rstrip().endswith("[") and close.lstrip().startswith("]")
        if is_list:
            opening, close = opening.rstrip().removesuffix("["), close.lstrip().removeprefix("]")
            separator = ""
    else:
        is_list = False
    name_open = ""
    if not (opening.strip() or close.strip()):
        opening, name_open = _split_at_last_tag(call_open, call.style)
        call_close, close = (
            _split_at_last_tag(call_close, call.style) if name_open else ("", call_close)
        )
        call_open = separator = ""
    return CallFormat(
        style=call.style,
        open=opening.strip(),
        close=close.strip(),
        call_open=call_open.strip(),
        call_close=call_close.strip(),
        separator=separator.strip(),
        is_list=is_list and call.style is CallStyle.JSON,
        name_open=name_open,
        **call.marks,
    )


def _split_at_last_tag(text: str, style: CallStyle) -> tuple[str, str]:
    """Return the tags before the last one, and the last one if there are several."""
    text = text.strip()
    place = text.rfind("<")
    if style is CallStyle.JSON or place <= 0:
        return text, ""
    return text[:place], text[place:]
