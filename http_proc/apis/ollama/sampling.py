"""Convert Ollama's options, format and think to the gateway's terms."""

import logging
import math
from functools import lru_cache
from typing import Any

import msgspec

from http_proc.apis.ollama.requests import OllamaOptions, OllamaRequest
from http_proc.chat.call import ReasoningOptions
from http_proc.protocol.errors import invalid
from http_proc.protocol.response_format import ANY_OBJECT, lenient, with_grammar
from http_proc.protocol.sampling import Sampling
from quadriga.answer_format import from_info
from quadriga.client.async_client import RequestOptions
from quadriga.sampling.params import SamplingParams

# Ollama's names of options -> SamplingParams' names.
OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "seed": "seed",
    "num_predict": "max_new_tokens",
}
_FIELDS = {field.name: field.type for field in msgspec.structs.fields(OllamaOptions)}
_INTEGERS = {name for name, kind in _FIELDS.items() if "int" in str(kind)}
MAX_OPTION_CHARS = 64
# The request's name of each field of the ring, for error messages.
NAMES = {
    **{field: f"options.{name}" for name, field in OPTIONS.items()},
    "logprobs": "top_logprobs",
    "template_args": "think",
}


def with_known_options(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose options are read as at Ollama.

    A number with a fraction stands for the integer below it where one is wanted, and an unknown
    option has no effect but a line in the log.
    """
    options = body.get("options")
    if not isinstance(options, dict):
        return body
    known = {}
    for name, value in options.items():
        if name not in _FIELDS:
            _warn_of_unknown(name[:MAX_OPTION_CHARS])
            continue
        is_whole = isinstance(value, float) and math.isfinite(value) and name in _INTEGERS
        known[name] = int(value) if is_whole else value
    return body | {"options": known}


@lru_cache(maxsize=256)
def _warn_of_unknown(name: str) -> None:
    """Log an unknown option, once for each name."""
    logging.warning("Ollama's option %r is not known here, and has no effect", name)


def ollama_sampling(call: OllamaRequest, context_length: int) -> Sampling:
    """Return the sampling parameters of a request.

    Args:
        call: The request.
        context_length: Length of the model's context in tokens.

    Raises:
        ApiError: an option cannot be obeyed.
    """
    if call.top_logprobs and not call.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    fields = _fields(call.options, context_length)
    if call.logprobs:
        fields["logprobs"] = call.top_logprobs
    sampling = Sampling(SamplingParams(**fields), dict(NAMES))
    return with_grammar(sampling, "format", _grammar(call.format))


def _fields(options: OllamaOptions, context_length: int) -> dict[str, Any]:
    if options.typical_p not in (None, 1.0):
        raise invalid(
            f"options.typical_p is {options.typical_p}: only 1, which is off, is supported; leave"
            " it out",
            "options.typical_p",
        )
    given = {field: getattr(options, name) for name, field in OPTIONS.items()}
    if (num_tokens := given["max_new_tokens"]) is not None and num_tokens < 1:
        given["max_new_tokens"] = context_length  # the ring clamps it to what is left
    if (seed := given["seed"]) is not None and seed < 0:
        given["seed"] = None
    return {field: value for field, value in given.items() if value is not None}


def _grammar(wanted: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(wanted, dict):
        return {"json_schema": lenient(wanted)}
    return {"json_schema": ANY_OBJECT} if wanted == "json" else {}


def length_options(call: OllamaRequest) -> RequestOptions:
    """Return the options of the ring that fit prompt and answer into the context.

    As at Ollama, an answer ends where the context does, whatever num_predict is.
    """
    options: RequestOptions = {"clamp_max_new_tokens": True}
    if call.truncate is not None:
        options["truncate_prompt"] = call.truncate
    return options


def ollama_reasoning(call: OllamaRequest, info: dict[str, Any]) -> ReasoningOptions:
    """Return the reasoning that `think` asks for; the model's default without it.

    Args:
        call: The request.
        info: The server's info.

    Raises:
        ApiError: the model does not reason.
    """
    if call.think and from_info(info["answer_format"]).reasoning is None:
        raise invalid(
            f"think is {call.think!r}, but {call.model} does not reason; leave it out", "think"
        )
    if isinstance(call.think, str):
        return ReasoningOptions(is_enabled=True, effort=call.think)
    return ReasoningOptions(is_enabled=call.think)


def without_images(images: list[str] | None, field: str) -> None:
    """Raise ApiError for images."""
    if images:
        raise invalid(
            f"{field} has {len(images)} images: this server takes only text; leave them out", field
        )
