"""Find the marks of tool calls: render calls with known words, and read what stands around them."""

from typing import Any, NamedTuple

import msgspec

from quadriga.answer_format import CallFormat, CallStyle, ReasoningFormat
from tokenizer_proc.preparation.templates.call_styles import (
    FoundCall,
    common_prefix,
    common_suffix,
    find_call,
)
from tokenizer_proc.preparation.templates.probes import (
    CONTENT,
    IDS,
    KEYS,
    NAMES,
    TOOLS,
    Prober,
    assistant,
    calls,
    results,
    user,
)

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
