"""Log-probabilities of tokens: by id between the processes, with texts for clients.

They are natural logarithms of the model's own distribution, before temperature, penalties, bias and
masks.
"""

import msgspec


class LogprobBlock(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of tokens and of the likeliest tokens at their positions.

    Attributes:
        values: float32 [tokens], of each token itself.
        width: number of further tokens per position.
        top_ids: int32 [tokens, width]: the likeliest ones, likeliest first, then those that the
            request chose; -1 where a request has fewer.
        top_values: float32 [tokens, width].
    """

    values: bytes
    width: int
    top_ids: bytes
    top_values: bytes


def block_of_token(block: LogprobBlock, index: int, width: int) -> LogprobBlock:
    """Return the logprobs of one token of a block, with the first `width` further tokens."""
    value = slice(4 * index, 4 * index + 4)
    top = slice(4 * index * block.width, 4 * (index * block.width + width))
    return LogprobBlock(block.values[value], width, block.top_ids[top], block.top_values[top])


class SampledLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of some of the tokens that a step sampled.

    Attributes:
        rows: int32 [tokens], index of each among all tokens of the message; -1: its request ended.
        block: the log-probabilities.
    """

    rows: bytes
    block: LogprobBlock


class PromptPiece(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of the next tokens of a prompt, computed by a row of the plan."""

    row: int
    block: LogprobBlock


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities for a client.

    The first token of a prompt has none: its value and top_values are NaN, its top_ids -1.

    Attributes:
        values: float32 [tokens], of each token itself.
        width: number of further tokens per position.
        top_ids: int32 [tokens, width]: the likeliest ones, likeliest first, then those that the
            request chose.
        top_values: float32 [tokens, width].
        pieces: text of each token in bytes, which may be a part of a character.
        top_pieces: texts of `top_ids`.
    """

    values: bytes
    width: int
    top_ids: bytes
    top_values: bytes
    pieces: list[bytes]
    top_pieces: list[bytes]


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of the whole prompt `token_ids` (int32 [tokens])."""

    token_ids: bytes
    logprobs: Logprobs
