"""The marks of the model's reasoning, for requests that limit it or have a grammar after it."""

import msgspec

from http_proc.protocol.errors import invalid
from quadriga.answer_format import AnswerFormat
from quadriga.sampling.params import SamplingParams

BUDGET = "thinking_token_budget"


def with_thinking(
    params: SamplingParams, answer_format: AnswerFormat, budget: int | None, name: str = BUDGET
) -> SamplingParams:
    """Return the parameters with the marks of the reasoning, if the model has any.

    Args:
        params: the parameters.
        answer_format: how the model writes.
        budget: number of tokens after which the reasoning is closed; None: as `params` say.
        name: the request's name of the budget, for error messages.

    Raises:
        ApiError: the reasoning is limited, and no marks are known.
    """
    budget = params.thinking_token_budget if budget is None else budget
    reasoning = answer_format.reasoning
    if reasoning is None or not reasoning.open:
        if budget is not None:
            raise invalid(
                f"{name} is {budget}: the model marks no reasoning that could be limited; leave it"
                " out, or start with --reasoning-parser if the model reasons",
                name,
            )
        return params
    return msgspec.structs.replace(
        params,
        thinking_token_budget=budget,
        thinking_start=reasoning.open,
        thinking_end=_closing(reasoning.close),
    )


def _closing(mark: str) -> str:
    """Return the text that closes the reasoning by force: a tag stands on a line of its own."""
    return f"\n{mark}\n\n" if mark.startswith("</") else mark
