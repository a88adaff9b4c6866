"""Log-probabilities as a client reads them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from quadriga.wire.messages.arrays import unpack_floats, unpack_ids
from quadriga.wire.messages.logprobs import Logprobs, PromptLogprobs


class LikelyToken(NamedTuple):
    """One of the likeliest tokens of its place. bytes: what it stands for, perhaps half a
    character."""

    token_id: int
    logprob: float
    bytes: bytes


@dataclass(slots=True)
class TokenLogprob:
    """A token and how likely the model's own distribution made it, in natural logarithms.

    logprob: None for the first token of a prompt. top: as many of the likeliest as were asked for,
    likeliest first.
    """

    token_id: int
    logprob: float | None
    bytes: bytes
    top: list[LikelyToken]

    @property
    def text(self) -> str:
        """U+FFFD where the bytes alone are no character."""
        return self.bytes.decode("utf-8", "replace")


def read_logprobs(token_ids: list[int], told: Logprobs) -> list[TokenLogprob]:
    """token_ids: those that are told of."""
    width = told.width
    argmax = [
        LikelyToken(*entry)
        for entry in zip(
            unpack_ids(told.top_ids), unpack_floats(told.top_values), told.top_pieces, strict=True
        )
    ]
    return [
        TokenLogprob(
            token_id,
            None if math.isnan(value) else value,
            piece,
            [one for one in argmax[index * width : (index + 1) * width] if one.token_id >= 0],
        )
        for index, (token_id, value, piece) in enumerate(
            zip(token_ids, unpack_floats(told.values), told.pieces, strict=True)
        )
    ]


def read_prompt_logprobs(told: PromptLogprobs) -> list[TokenLogprob]:
    """Of all tokens of a prompt."""
    return read_logprobs(unpack_ids(told.token_ids).tolist(), told.logprobs)
