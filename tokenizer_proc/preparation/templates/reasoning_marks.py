"""Find the marks of a model's reasoning, and the variable of the template that switches it."""

import re
from typing import NamedTuple

import msgspec

from quadriga.answer_format import ReasoningFormat
from quadriga.known_formats import KNOWN_FORMATS
from tokenizer_proc.preparation.templates.probes import (
    CONTENT,
    REASONING,
    REASONING_FIELDS,
    SWITCHES,
    Prober,
    assistant,
    user,
)

# The last tag of a text, and a word after it as in <|channel>thought.
_LAST_TAG = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])\s*\w*\s*$")


class _Switch(NamedTuple):
    """The variable that turns the reasoning on and off, and whether it is on by default."""

    name: str = ""
    is_default: bool = True


def derive_reasoning(
    prober: Prober, source: str, given: ReasoningFormat | None
) -> ReasoningFormat | None:
    """Return the marks of the reasoning; None if the template knows of none.

    Args:
        prober: renders the template.
        source: the template's text.
        given: the marks, if they are known.
    """
    marks = _rendered_marks(prober)
    known = _known_reasoning(source, marks)
    derived = ReasoningFormat(open=marks[0], close=marks[1]) if marks else None
    found = given or known or derived
    if found is None:
        return None
    switch = _find_switch(prober)
    return msgspec.structs.replace(found, switch=switch.name, is_default=switch.is_default)


def _rendered_marks(prober: Prober) -> tuple[str, str] | None:
    """Return what stands before and after the reasoning of an assistant's turn."""
    turn = assistant(**dict.fromkeys(REASONING_FIELDS, REASONING))
    for variables in ({}, dict.fromkeys(SWITCHES, True)):
        text = prober.text([user(), turn], variables=variables)
        before, found, after = (text or "").partition(REASONING)
        opening = _LAST_TAG.search(before)
        if found and opening and CONTENT in after:
            marks = opening.group().strip(), _first_tag(after[: after.index(CONTENT)])
            return None if _are_of_turns(prober, marks) else marks
    return None


def _are_of_turns(prober: Prober, marks: tuple[str, str]) -> bool:
    """Return whether the marks begin and end turns, so that they are none of the reasoning."""
    question = prober.text([user()]) or ""
    answer = (prober.text([user(), assistant()]) or "").partition(CONTENT)[0]
    return marks[0] in question or (marks[0] in answer and marks[1] not in answer)


def _first_tag(text: str) -> str:
    """Return a text up to the end of its first tag, without whitespace around it."""
    end = text.find(">") + 1 or text.find("]") + 1 or len(text)
    return text[:end].strip()


def _known_reasoning(source: str, marks: tuple[str, str] | None) -> ReasoningFormat | None:
    """Return the known format whose marks are all in the template, the one with the most marks."""
    formats = [known.reasoning for known in KNOWN_FORMATS.values() if known.reasoning]
    if marks is not None:
        formats = [known for known in formats if (known.open, known.close) == marks]
    present = [known for known in formats if all(mark in source for mark in _marks(known))]
    return max(present, key=lambda known: len(_marks(known)), default=None)


def _marks(known: ReasoningFormat) -> list[str]:
    marks = (known.open, known.close, known.text_open, known.text_close)
    return [mark for mark in marks if mark]


def _find_switch(prober: Prober) -> _Switch:
    plain = prober.text([user()], asks=True)
    for name in SWITCHES:
        on, off = (
            prober.text([user()], asks=True, variables={name: value}) for value in (True, False)
        )
        if None not in (on, off) and on != off:
            return _Switch(name, plain != off)
    return _Switch()
