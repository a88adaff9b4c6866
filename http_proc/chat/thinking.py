"""The marks of the model's reasoning, for requests that limit it or have a grammar after it."""

import msgspec

from http_proc.protocol.errors import invalid
from quadriga.answer_format import AnswerFormat
from quadriga.sampling.params import SamplingParams


def with_thinking(
    params: SamplingParams, answer_format: AnswerFormat, budget: int | None = None
) -> SamplingParams:
    """Return the parameters with the marks of the reasoning, if the model has any.

    Args:
        params: the parameters.
        answer_format: how the model writes.
        budget: number of tokens after which a reasoning is closed, if the model reasons; None: as
            `params` say.

    Raises:
        ApiError: `params` limit the reasoning, and no marks are known.
    """
    reasoning, wanted = answer_format.reasoning, params.thinking_token_budget
    if reasoning is None or not reasoning.open:
        if wanted is not None:
            raise invalid(
                f"thinking_token_budget is {wanted}: the model marks no reasoning that could be"
                " limited; leave it out, or start with --reasoning-parser if the model reasons",
                "thinking_token_budget",
            )
        return params
    return msgspec.structs.replace(
        params,
        thinking_token_budget=wanted if budget is None else budget,
        thinking_start=reasoning.open,
        thinking_end=_closing(reasoning.close),
    )


def _closing(mark: str) -> str:
    """Return the text that closes the reasoning by force: a tag stands on a line of its own."""
    return f"\n{mark}\n\n" if mark.startswith("</") else mark
