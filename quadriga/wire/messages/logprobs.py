"""Log-probabilities of tokens: between the inner processes by id, for clients with their texts.

They are natural logarithms, of the model's own distribution: before temperature, penalties, bias
and masks.
"""

import msgspec


class LogprobBlock(msgspec.Struct, array_like=True, frozen=True):
    """values: float32 [tokens], of each token itself. top_ids: int32, top_values: float32
    [tokens, width], the likeliest at its place, likeliest first."""

    values: bytes
    width: int
    top_ids: bytes
    top_values: bytes


class SampledLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Of some of the tokens that a step sampled. rows: int32 [tokens], the place of each among all
    tokens of the message; -1: nobody waits for it any more."""

    rows: bytes
    block: LogprobBlock


class PromptPiece(msgspec.Struct, array_like=True, frozen=True):
    """Of the tokens of a prompt that follow those which came before. row: of the plan."""

    row: int
    block: LogprobBlock


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """For a client. values: float32 [tokens]; top_ids: int32, top_values: float32 [tokens, width],
    likeliest first; pieces, top_pieces: the bytes of each of these ids, which may be half a
    character.

    The first token of a prompt has no probability: there value and top_values are NaN, top_ids -1.
    """

    values: bytes
    width: int
    top_ids: bytes
    top_values: bytes
    pieces: list[bytes]
    top_pieces: list[bytes]


class PromptLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """token_ids: int32 [tokens], the whole prompt."""

    token_ids: bytes
    logprobs: Logprobs
