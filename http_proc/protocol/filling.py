"""Prompts for filling in the middle, for the APIs that have a suffix."""

from typing import Any

import msgspec

from http_proc.protocol.errors import ApiError, invalid
from quadriga.fill_format import FillFormat, fill_format_from_info
from quadriga.sampling.params import SamplingParams


def fill_format(info: dict[str, Any], model: str, field: str) -> FillFormat:
    """Return the format of the served model.

    Args:
        info: The server's info.
        model: Name of the model, for the error.
        field: The request's field that asks for it.

    Raises:
        ApiError: the model's vocabulary has no tokens for it.
    """
    known = fill_format_from_info(info["fill_format"])
    if known is None:
        raise no_fill_format(model, field)
    return known


def no_fill_format(model: str, field: str) -> ApiError:
    """Return the error of a model that cannot fill in the middle."""
    return invalid(
        f"{field} needs a model that fills in the middle: the vocabulary of {model} has no tokens"
        " for prefix, suffix and middle, such as <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>;"
        f" leave {field} out, or serve a model such as Qwen2.5-Coder, StarCoder2, Code Llama,"
        " DeepSeek Coder, CodeGemma or Codestral",
        field,
        "no_fill_tokens",
    )


def fill_params(params: SamplingParams, known: FillFormat) -> SamplingParams:
    """Return parameters that also end the answer at the marks of the format."""
    ends = list(dict.fromkeys([*params.stop_token_ids, *known.stop_token_ids]))
    return msgspec.structs.replace(params, stop_token_ids=ends)
