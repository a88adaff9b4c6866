"""Apply --tool-call-parser and --reasoning-parser to the format that the template shows."""

from typing import NamedTuple

import msgspec

from quadriga.answer_format import AnswerFormat, ReasoningFormat
from quadriga.config.frontend_args import AUTO, NONE
from quadriga.known_formats import KNOWN_FORMATS
from tokenizer_proc.preparation.templates.derive import has_special_marks


class ParserNames(NamedTuple):
    """The values of the flags: AUTO, NONE, or a name of KNOWN_FORMATS."""

    tool_call: str = AUTO
    reasoning: str = AUTO


def overrule(
    derived: AnswerFormat, names: ParserNames, special_tokens: frozenset[str]
) -> AnswerFormat:
    """Return the format with the marks that the flags choose.

    Args:
        derived: what the chat template shows.
        names: the values of the flags.
        special_tokens: tokens that leave no text unless asked for.
    """
    calls, reasoning = derived.calls, derived.reasoning
    if names.tool_call != AUTO:
        calls = KNOWN_FORMATS[names.tool_call].calls if names.tool_call != NONE else None
    if names.reasoning != AUTO:
        known = KNOWN_FORMATS[names.reasoning].reasoning if names.reasoning != NONE else None
        reasoning = known and _with_switch(known, reasoning)
    return msgspec.structs.replace(
        derived,
        source=derived.source if names.tool_call == AUTO else names.tool_call,
        calls=calls,
        reasoning=reasoning,
        has_special_marks=has_special_marks(calls, reasoning, special_tokens),
    )


def _with_switch(known: ReasoningFormat, derived: ReasoningFormat | None) -> ReasoningFormat:
    """Return a known format with the switch that the chat template has."""
    if derived is None or not derived.switch:
        return known
    return msgspec.structs.replace(known, switch=derived.switch, is_default=derived.is_default)
