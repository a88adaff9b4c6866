"""Sampling fields by their names at OpenAI, vLLM and SGLang, and what other fields make of them.

These are structured output, prompts for filling in the middle, and limits of the reasoning. A new
field of SamplingParams needs one line in a table of this file.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import msgspec.inspect

from http_proc.core.errors import ApiError, from_server, invalid, shortened
from http_proc.generation.schema import OpenAIRequest, ResponseFormat, StructuredOutputs
from quadriga import errors, keywords
from quadriga.sampling.params import GRAMMAR_FIELDS, MAX_CHOICES, MAX_SEED, SamplingParams
from quadriga.sampling.validation import check_counts, check_numbers
from quadriga.server.answer_format import AnswerFormat
from quadriga.server.grammars.json_schema import OPTIONS
from quadriga.server.model_info import FillFormat, fill_format_from_info

Body = TypeVar("Body", bound=msgspec.Struct)
MAX_CHOICES_PER_REQUEST = 1024  # prompts times n

# Each table maps the request's name of a field to SamplingParams' name.
COMMON = {name: name for name in (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "stop_regex", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "no_stop_trim", "allowed_token_ids",
    "bad_words", "ttft_target", "json_schema", "regex", "ebnf", "choice", "structural_tag", "n",
    "first_token_ids",
)}  # fmt: skip
OPENAI = {
    **COMMON,
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "seed",
    "thinking_token_budget": "thinking_token_budget",
    "logprob_token_ids": "logprob_token_ids",
}
CHAT = {**OPENAI, "max_completion_tokens": "max_new_tokens"}
SGLANG = {
    **COMMON,
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "sampling_seed": "seed",
}

_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")
_PATH = re.compile(r"\$(?:\.(\w+))?")


class Sampling(NamedTuple):
    """Sampling parameters, and the request's name of each field, for error messages."""

    params: SamplingParams
    names: dict[str, str]


def take_sampling(
    body: dict[str, Any], table: Mapping[str, str], defaults: Mapping[str, Any]
) -> Sampling:
    """Remove the sampling fields from `body` and return them; null means "as if absent".

    `table` maps the request's names to SamplingParams' names, which `defaults` has as keys.

    Raises:
        ApiError: a wrong type, a number out of its range, a list that is too long, or a grammar
            given by two names.
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
            raise invalid(f"{name} and {names[field]} are the same field; leave one out", name)
        values[field], names[field] = value, name
    _read_as_elsewhere(values)
    try:
        check_counts(values)
        params = msgspec.convert(values, SamplingParams, str_keys=True)
        check_numbers(params)
        return Sampling(params, names)
    except errors.InvalidRequest as error:
        raise from_server(error, names) from None
    except msgspec.ValidationError as error:
        raise wrong_type(error, names) from None


def _read_as_elsewhere(values: dict[str, Any]) -> None:
    """Replace values that other servers take and this one does not.

    `top_p: 0` keeps the likeliest token alone, so it is greedy. The seed -1 stands for none, as at
    vLLM, and another negative one of 64 bits for the number of its lower 63 bits.
    """
    top_p, seed = values.get("top_p"), values.get("seed")
    if type(top_p) in (int, float) and top_p == 0:
        values |= {"top_p": 1.0, "temperature": 0.0}
    if type(seed) is int and seed == -1:
        values["seed"] = None
    elif type(seed) is int and -MAX_SEED - 1 <= seed < 0:
        values["seed"] = seed & MAX_SEED


def wrong_type(
    error: Exception,
    names: Mapping[str, str],
    known: Iterable[str] = (),
    body_type: type | None = None,
) -> ApiError:
    """Return a 400 that names the field of msgspec's message (`… - at `$.field``).

    Args:
        error: of msgspec.
        names: the request's name of each field.
        known: the fields that the request may have.
        body_type: the type that the value does not have; where a field has a few values, the
            message lists them.
    """
    text = shortened(str(error))
    if body_type is not None and (allowed := allowed_values(body_type, text)):
        text += f": it must be one of {', '.join(map(repr, allowed))}"
    path = _PATH.search(text)
    field = path[1] if path and path[1] else ""
    name = names.get(field, field)
    unknown = re.search(r"unknown field `(\w*)`", text)
    if unknown is not None and not field:
        name = unknown[1]
        near = keywords.nearest(name, known)
        return invalid(f"{name} is not a field of this request; leave it out{near}", name)
    missing = re.search(r"missing required field `(\w*)`", text)
    if missing is not None and not field:
        return invalid(f"{missing[1]} is missing", missing[1])
    return invalid(text.replace(f"$.{field}", f"$.{name}"), name or None)


def convert(
    body: dict[str, Any], body_type: type[Body], sampling_names: Iterable[str] = ()
) -> Body:
    """Return a body as a typed object; null means "as if absent".

    Args:
        body: JSON object.
        body_type: type of the object.
        sampling_names: fields that the body may have beside those of the type.

    Raises:
        ApiError: a field is wrong.
    """
    known = body_type.__struct_encode_fields__
    fields = {name: value for name, value in body.items() if value is not None or name not in known}
    try:
        return msgspec.convert(fields, body_type)
    except (msgspec.ValidationError, RecursionError) as error:
        raise wrong_type(error, {}, [*known, *sampling_names], body_type) from None


def allowed_values(body_type: type, message: str) -> list[str | int | bool | None]:
    """Return the values of the field that msgspec's message names, if it has a few.

    Args:
        body_type: the type of the whole body.
        message: such as "Invalid enum value 'x' - at `$.messages[0].role`", or "Invalid value …" of
            a field that says which type an object has.
    """
    if re.match("Invalid (?:enum )?value", message) is None:
        return []
    _, _, path = message.rpartition("`$")
    kinds: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(body_type)]
    for name in _STEP.findall(path):
        kinds = [inner for kind in _flat(kinds) for inner in _below(kind, name)]
    return [
        value
        for kind in _flat(kinds)
        if isinstance(kind, msgspec.inspect.LiteralType)
        for value in kind.values
    ]


def _flat(kinds: Iterable[msgspec.inspect.Type]) -> Iterator[msgspec.inspect.Type]:
    """Yield types with the members of unions in place of the unions."""
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.UnionType):
            yield from _flat(kind.types)
        else:
            yield kind


def _below(kind: msgspec.inspect.Type, name: str) -> Iterator[msgspec.inspect.Type]:
    """Yield the types of a field, or of the items if the name is an index or a key."""
    if isinstance(kind, msgspec.inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == name)
        if name == kind.tag_field and kind.tag is not None:
            yield msgspec.inspect.LiteralType((kind.tag,))
    elif isinstance(kind, msgspec.inspect.ListType):
        yield kind.item_type
    elif isinstance(kind, msgspec.inspect.DictType):
        yield kind.value_type


def check_receipt(call: OpenAIRequest) -> None:
    """Refuse a receipt in a stream."""
    if call.receipt and call.stream:
        raise invalid("receipt is set, and a stream has none: leave out stream", "receipt")


def check_prompt_logprobs(call: OpenAIRequest) -> None:
    """Raise a 400 for prompt_logprobs in a stream: vLLM's format has no field for them."""
    if call.stream and call.prompt_logprobs is not None:
        raise invalid(
            "prompt_logprobs cannot be streamed: leave stream out, or send echo and logprobs to"
            " /v1/completions",
            "prompt_logprobs",
        )


def check_choices(n: int, num_prompts: int) -> None:
    """Raise a 400 for more choices than one request may have."""
    if not 1 <= n <= MAX_CHOICES:
        raise invalid(f"n is {n}: it must be from 1 to {MAX_CHOICES}", "n")
    if n * num_prompts > MAX_CHOICES_PER_REQUEST:
        raise invalid(
            f"{num_prompts} prompts of {n} choices are {n * num_prompts}: one request may have"
            f" {MAX_CHOICES_PER_REQUEST}; send several",
            "prompt",
        )


ANY_OBJECT = {"type": "object"}


def with_response_format(sampling: Sampling, call: OpenAIRequest) -> Sampling:
    """Add the grammar of response_format or structured_outputs. Raises ApiError."""
    if call.response_format is not None:
        grammar = _response_format(call.response_format)
        sampling = with_grammar(sampling, "response_format", grammar)
    if call.structured_outputs is not None:
        grammar = _structured_outputs(call.structured_outputs)
        sampling = with_grammar(sampling, "structured_outputs", grammar)
    return sampling


def with_grammar(sampling: Sampling, name: str, grammar: dict[str, Any]) -> Sampling:
    """Add `grammar` (fields of SamplingParams), for which the request's field `name` asks."""
    if not grammar:
        return sampling
    field = next(
        (field for field in GRAMMAR_FIELDS if getattr(sampling.params, field) is not None), None
    )
    if field is not None:
        other = sampling.names.get(field, field)
        raise invalid(
            f"{other} and {name} are both given, and a text can obey one: leave one out", name
        )
    params = msgspec.structs.replace(sampling.params, **grammar)
    return Sampling(params, {**sampling.names, **dict.fromkeys(grammar, name)})


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of which what no grammar can enforce is left out, instead of refused."""
    return {**schema, OPTIONS: {"lenient": True}}


def _response_format(wanted: ResponseFormat) -> dict[str, Any]:
    match wanted.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            given = wanted.json_schema or {}
            schema = given.get("schema")
            if isinstance(schema, dict):
                return {"json_schema": schema if given.get("strict") else lenient(schema)}
            raise invalid(
                "response_format.json_schema.schema is missing: it must be a JSON schema",
                "response_format",
            )
        case "structural_tag":
            if wanted.format is not None:
                return {"structural_tag": {"format": wanted.format}}
            tag = {"structures": wanted.structures or [], "triggers": wanted.triggers or []}
            return {"structural_tag": tag}
    raise invalid(
        f"response_format.type is {wanted.type!r}: it must be 'text', 'json_object',"
        " 'json_schema' or 'structural_tag'",
        "response_format",
    )


def _structured_outputs(wanted: StructuredOutputs) -> dict[str, Any]:
    fields = {
        "json_schema": ANY_OBJECT if wanted.json_object else wanted.json,
        "regex": wanted.regex,
        "ebnf": wanted.grammar,
        "choice": wanted.choice,
        "structural_tag": wanted.structural_tag,
    }
    return {field: value for field, value in fields.items() if value is not None}


def fill_format(info: dict[str, Any], model: str, field: str) -> FillFormat:
    """Return the format of the served model.

    Args:
        info: the server's info.
        model: name of the model, for the error.
        field: the request's field that asks for it.

    Raises:
        ApiError: the model's vocabulary has no tokens for it.
    """
    known = fill_format_from_info(info["fill_format"])
    if known is None:
        raise invalid(
            f"{field} needs a model that fills in the middle: the vocabulary of {model} has no"
            " tokens for prefix, suffix and middle, such as <|fim_prefix|>, <|fim_suffix|> and"
            f" <|fim_middle|>; leave {field} out, or serve a model such as Qwen2.5-Coder,"
            " StarCoder2, Code Llama, DeepSeek Coder, CodeGemma or Codestral",
            field,
            "no_fill_tokens",
        )
    return known


def fill_params(params: SamplingParams, known: FillFormat) -> SamplingParams:
    """Return parameters that also end the answer at the marks of the format."""
    ends = list(dict.fromkeys([*params.stop_token_ids, *known.stop_token_ids]))
    return msgspec.structs.replace(params, stop_token_ids=ends)


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
