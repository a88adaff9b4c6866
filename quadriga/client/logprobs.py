"""Log-probabilities in the form that a client reads."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from quadriga.wire.messages.arrays import unpack_floats, unpack_ids
from quadriga.wire.messages.logprobs import Logprobs, PromptLogprobs


class LikelyToken(NamedTuple):
    """One of the likeliest tokens at its position.

    Attributes:
        bytes: text of the token, perhaps a part of a character.
    """

    token_id: int
    logprob: float
    bytes: bytes


@dataclass(slots=True)
class TokenLogprob:
    """A token and its log-probability in the model's own distribution, as a natural logarithm.

    Attributes:
        logprob: None for the first token of a prompt.
        bytes: text of the token, perhaps a part of a character.
        top: the requested number of likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float | None
    bytes: bytes
    top: list[LikelyToken]

    @property
    def text(self) -> str:
        """Text of the token, with U+FFFD for a part of a character."""
        return self.bytes.decode("utf-8", "replace")


def read_logprobs(token_ids: list[int], data: Logprobs) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens, one item per token id."""
    width = data.width
    likeliest = [
        LikelyToken(*entry)
        for entry in zip(
            unpack_ids(data.top_ids), unpack_floats(data.top_values), data.top_pieces, strict=True
        )
    ]
    return [
        TokenLogprob(
            token_id,
            None if math.isnan(value) else value,
            piece,
            [top for top in likeliest[index * width : (index + 1) * width] if top.token_id >= 0],
        )
        for index, (token_id, value, piece) in enumerate(
            zip(token_ids, unpack_floats(data.values), data.pieces, strict=True)
        )
    ]


def read_prompt_logprobs(data: PromptLogprobs) -> list[TokenLogprob]:
    """Return the log-probabilities of all tokens of a prompt."""
    return read_logprobs(unpack_ids(data.token_ids).tolist(), data.logprobs)
