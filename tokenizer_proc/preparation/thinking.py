"""Where the reasoning of an answer begins, by the end of the prompt's text."""

import msgspec

from quadriga.answer_format import ends_inside
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.grammar import ThinkingForm


def thinking_form(
    params: SamplingParams, prompt_end: str, has_grammar: bool
) -> ThinkingForm | None:
    """Return the reasoning that is limited, or that precedes the grammar.

    The prompt ends within the reasoning if the last of the marks in its end begins it. It has the
    whole reasoning if it ends with the mark that ends it. Otherwise the answer may begin with it.

    Args:
        params: the parameters, checked.
        prompt_end: the last characters of the prompt's text.
        has_grammar: a grammar applies to the answer.

    Returns:
        None if the reasoning is not marked, or over, or nothing depends on it.
    """
    start, end = params.thinking_start.strip(), params.thinking_end.strip()
    if not end or (params.thinking_token_budget is None and not has_grammar):
        return None
    is_inside = not start or ends_inside(prompt_end, start, end)
    if not is_inside and prompt_end.rstrip().endswith(end):
        return None
    return ThinkingForm(params.thinking_end, start, is_inside, params.thinking_token_budget)


def without_thinking(params: SamplingParams) -> SamplingParams:
    """Return a copy without the parameters of the reasoning."""
    return msgspec.structs.replace(
        params, thinking_token_budget=None, thinking_start="", thinking_end=""
    )
