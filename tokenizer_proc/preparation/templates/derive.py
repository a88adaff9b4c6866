"""Derive how a model writes its answers from its chat template."""

import json
import re
from typing import NamedTuple

from quadriga.answer_format import AnswerFormat, CallFormat, CallStyle, ReasoningFormat
from quadriga.known_formats import KNOWN_FORMATS
from tokenizer_proc.preparation.templates.call_marks import derive_calls, texts_of
from tokenizer_proc.preparation.templates.call_styles import ARGUMENTS
from tokenizer_proc.preparation.templates.needs import TemplateNeeds
from tokenizer_proc.preparation.templates.probes import Prober
from tokenizer_proc.preparation.templates.reasoning_marks import derive_reasoning
from tokenizer_proc.preparation.templates.response_template import ResponseMarks

DERIVED = "derived from the chat template"
GIVEN = "response_template of the tokenizer"
# The form of calls that is described to a model whose template has no tools.
GENERIC = "hermes"
GENERIC_SOURCE = "hermes, as the chat template has no tools"
UNKNOWN_SOURCE = "hermes, as the chat template does not show how calls are written"
# Texts of templates that do not show how calls are written, or show a part of it only.
HINTS = {
    "harmony": ("<|channel|>", "<|message|>", "commentary"),
    "lfm2": ("<|tool_list_start|>",),
}


class Derivation(NamedTuple):
    """How a model writes its answers.

    Attributes:
        has_calls: the marks of calls were found in the template or among the known formats;
            otherwise they are those of GENERIC.
    """

    answer_format: AnswerFormat
    has_calls: bool


def derive_format(
    prober: Prober,
    source: str,
    needs: TemplateNeeds,
    end_marks: tuple[str, ...],
    special_tokens: frozenset[str],
    given: ResponseMarks,
) -> Derivation:
    """Return the format of answers.

    Args:
        prober: renders the template.
        source: the template's text.
        needs: what the template takes.
        end_marks: tokens that end a turn, which no answer has as text.
        special_tokens: tokens that leave no text unless asked for.
        given: marks that the tokenizer's configuration gives; they are preferred.
    """
    calls = None
    if given.calls is not None:
        calls = _named(given.calls, GIVEN)
    elif needs.takes_tools or needs.takes_calls:
        calls = _find_calls(prober, source, needs, end_marks)
    has_calls = calls is not None
    if calls is None:
        unknown = UNKNOWN_SOURCE if needs.takes_tools else GENERIC_SOURCE
        calls = _Named(KNOWN_FORMATS[GENERIC].calls, unknown)
    reasoning = derive_reasoning(prober, source, given.reasoning)
    if calls.source == "harmony":
        reasoning = KNOWN_FORMATS["harmony"].reasoning
    answer_format = AnswerFormat(
        source=calls.source,
        calls=calls.calls,
        reasoning=reasoning,
        takes_tools=needs.takes_tools,
        has_special_marks=has_special_marks(calls.calls, reasoning, special_tokens),
    )
    return Derivation(answer_format, has_calls)


class _Named(NamedTuple):
    calls: CallFormat | None
    source: str


def _named(calls: CallFormat, source: str) -> _Named:
    """Return the known format with the same marks, or the marks with their source."""
    known = _known_like(calls)
    return _Named(known.calls, known.source) if known else _Named(calls, source)


def _find_calls(
    prober: Prober, source: str, needs: TemplateNeeds, end_marks: tuple[str, ...]
) -> _Named | None:
    """Return the marks of calls and where they come from; None if they cannot be found."""
    for name, hints in HINTS.items():
        if all(hint in source for hint in hints):
            return _Named(KNOWN_FORMATS[name].calls, name)
    arguments = json.dumps(ARGUMENTS) if needs.arguments_are_text else ARGUMENTS
    found = derive_calls(prober, arguments, end_marks)
    if found.calls is not None:
        return _named(found.calls, DERIVED)
    known = _known_by_marks(source)
    if known is None or known.calls is None:
        return None
    agrees = found.style is known.calls.style if found.is_shown else True
    return _Named(known.calls, known.source) if agrees else None


def has_special_marks(
    calls: CallFormat | None, reasoning: ReasoningFormat | None, special_tokens: frozenset[str]
) -> bool:
    """Return whether a mark has a special token in it."""
    marks = [mark for part in (calls, reasoning) if part is not None for mark in texts_of(part)]
    return any(token and token in mark for mark in marks for token in special_tokens)


def _known_like(derived: CallFormat) -> AnswerFormat | None:
    """Return the known format with the same marks as the derived ones."""
    return next(
        (
            known
            for known in KNOWN_FORMATS.values()
            if known.calls is not None and _agree(known.calls, derived)
        ),
        None,
    )


def _agree(known: CallFormat, derived: CallFormat) -> bool:
    known_close = _plain(known.call_close + known.close)
    derived_close = _plain(derived.call_close + derived.close)
    return _signature(known) == _signature(derived) and (
        derived_close == known_close
        or (known_close != "" and derived_close.startswith(known_close))
    )


def _signature(calls: CallFormat) -> tuple[object, ...]:
    keys = (calls.name_key, calls.arguments_key) if calls.style is CallStyle.JSON else ()
    marks = (
        calls.open + calls.call_open + calls.name_open,
        calls.name_close,
        calls.key_open,
        calls.key_close,
        calls.string_key_close,
        calls.value_close,
        calls.quote,
    )
    return (calls.style, calls.is_list, keys, *map(_plain, marks))


def _plain(mark: str) -> str:
    return re.sub(r"\s+", "", mark)


def _known_by_marks(source: str) -> AnswerFormat | None:
    """Return the known format whose marks of calls are all in the template, if it has any."""
    present = []
    for known in KNOWN_FORMATS.values():
        marks = [] if known.calls is None else [m for m in _outer(known.calls) if m]
        if marks and all(mark.strip() in source for mark in marks):
            present.append((sum(map(len, marks)), known))
    return max(present, key=lambda found: found[0])[1] if present else None


def _outer(calls: CallFormat) -> tuple[str, ...]:
    return (calls.open, calls.close, calls.call_open, calls.call_close)
