"""The sampling fields of a request, by the names of OpenAI, vLLM and SGLang.

A new field of SamplingParams needs one line in a table here.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from http_proc.protocol.errors import from_ring, invalid, shortened
from http_proc.protocol.schema import OpenAIRequest
from quadriga.errors import InvalidRequest
from quadriga.sampling.limits import MAX_CHOICES
from quadriga.sampling.params import GRAMMAR_FIELDS, SamplingParams
from quadriga.sampling.validation import check_counts

EVERYWHERE = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "include_stop_str_in_output",
    "no_stop_trim": "no_stop_trim",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "choice": "choice",
    "structural_tag": "structural_tag",
    "n": "n",
}
OPENAI = {
    **EVERYWHERE,
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "seed",
}
CHAT = {**OPENAI, "max_completion_tokens": "max_new_tokens"}
NATIVE = {
    **EVERYWHERE,
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "sampling_seed": "seed",
}
"""SGLang's sampling_params."""

_AT = re.compile(r"\$(?:\.(\w+))?")


class Sampling(NamedTuple):
    """params, and what SamplingParams' fields are called in this request, for errors."""

    params: SamplingParams
    names: dict[str, str]


def take_sampling(
    body: dict[str, Any], table: Mapping[str, str], defaults: Mapping[str, Any]
) -> Sampling:
    """Take the sampling fields out of a body; null means "as if absent".

    defaults: by the names of SamplingParams. Raises ApiError for a wrong type, for a list that
    is too long, and for one grammar by two names.
    """
    values: dict[str, Any] = dict(defaults)
    names: dict[str, str] = {}
    for name, field in table.items():
        if name not in body:
            continue
        value = body.pop(name)
        if value is None:
            continue
        if field in names and field in GRAMMAR_FIELDS:
            raise invalid(f"{name} and {names[field]} are one thing; leave one out", name)
        values[field], names[field] = value, name
    try:
        check_counts(values)
        return Sampling(msgspec.convert(values, SamplingParams, str_keys=True), names)
    except InvalidRequest as error:
        raise from_ring(error, names) from None
    except msgspec.ValidationError as error:
        raise wrong_type(error, names) from None


def wrong_type(error: Exception, names: Mapping[str, str]) -> Exception:
    """400 that names the field to which msgspec's message points (`… - at `$.field``)."""
    text = shortened(str(error))
    at = _AT.search(text)
    field = at[1] if at and at[1] else ""
    name = names.get(field, field)
    unknown = re.search(r"unknown field `(\w*)`", text)
    if unknown is not None and not field:
        return invalid(f"{unknown[1]} is no field of this request; leave it out", unknown[1])
    missing = re.search(r"missing required field `(\w*)`", text)
    if missing is not None and not field:
        return invalid(f"{missing[1]} is missing", missing[1])
    return invalid(text.replace(f"$.{field}", f"$.{name}"), name or None)


def check_prompt_logprobs(call: OpenAIRequest) -> None:
    """400 where they are asked for in vLLM's way, which has no place for them in a stream."""
    if call.stream and call.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs cannot be streamed: leave stream out, or send echo and logprobs to"
            " /v1/completions",
            "prompt_logprobs",
        )


def check_choices(n: int, prompts: int, limit: int) -> None:
    """400 for more choices than one request may have."""
    if not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n is {n}: it must be from 1 to {MAX_CHOICES}", "n")
    if n * prompts > limit:
        raise invalid(
            f"{prompts} prompts of {n} choices are {n * prompts}: one request may have {limit};"
            " send several",
            "prompt",
        )
