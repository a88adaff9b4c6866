"""Requests of Ollama's API: bodies, messages, and options.

The docstrings of the bodies are the descriptions in /openapi.json.
"""

import logging
import math
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec

from http_proc.answer.events import new_call_id
from http_proc.core.errors import invalid
from http_proc.generation.chat_call import ReasoningOptions
from http_proc.generation.chat_messages import chat_prompt
from http_proc.generation.sampling import ANY_OBJECT, Sampling, lenient, with_grammar
from http_proc.generation.schema import FunctionCall, Message, RequestBody, Tool, ToolCall, Top
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Chat
from quadriga.sampling.params import MAX_SEED, SamplingParams
from quadriga.server.answer_format import from_info

KeepAlive = str | float
Images = list[str]


class OllamaOptions(RequestBody):
    """Sampling parameters.

    num_predict: the largest number of tokens; below 1: what the context leaves. seed: below 0:
    drawn at random. typical_p: 1 only. An absent parameter has the server's default, which is the
    model's own. The fields after typical_p have no effect.
    """

    num_predict: Annotated[int, msgspec.Meta(le=2**31 - 1)] | None = None
    seed: Annotated[int, msgspec.Meta(le=MAX_SEED)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_gqa: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None


class OllamaRequest(RequestBody, kw_only=True):
    """Fields of both endpoints.

    format: "json", or a JSON schema that the answer obeys. think: whether the model reasons first,
    or how much. truncate: cut a prompt that is too long to its last tokens. logprobs: return the
    logprob of each token, with top_logprobs top tokens. keep_alive and shift have no effect.
    """

    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: OllamaOptions = msgspec.field(default_factory=OllamaOptions)
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: bool | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    keep_alive: KeepAlive | None = None
    shift: bool | None = None


class OllamaFunction(msgspec.Struct):
    """A function that the model has called. index is ignored."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaToolCall(msgspec.Struct):
    """A call by the model."""

    function: OllamaFunction
    id: str = ""
    type: Literal["function"] = "function"


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn.

    tool_name, tool_call_id: the tool that answers and the id of its call; without them, answers are
    taken in the order of the calls.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat. Without messages the answer says that the model is loaded."""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: list[Tool] = msgspec.field(default_factory=list)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate.

    prompt: a turn of the user, which the chat template renders, with `system` before it. raw: the
    prompt is sent as it is, as it is to a model without a chat template. suffix: the text after the
    answer, for models that fill in the middle. context: the field `context` of an earlier answer,
    to continue from there; an empty list asks for one. Without a prompt the answer says that the
    model is loaded.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    raw: bool = False
    context: list[int] | None = None
    images: Images = msgspec.field(default_factory=list)


class OllamaShowRequest(RequestBody, kw_only=True):
    """POST /api/show. name: older name of the field model. verbose has no effect."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None


# Convert Ollama's options, format and think to the gateway's terms.

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
        call: the request.
        context_length: length of the model's context in tokens.

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
        call: the request.
        info: the server's info.

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


def ollama_chat(messages: list[OllamaMessage]) -> Chat:
    """Return the turns of a chat.

    A tool's answer gets the id of the call that it answers: the one of its tool_call_id, else the
    first open call of its tool_name, else the first open call. Calls without an id get one.

    Raises:
        ApiError: a message has images, or answers no call; or the chat is over a limit.
    """
    open_calls: list[ToolCall] = []
    converted = []
    for index, message in enumerate(messages):
        without_images(message.images, f"messages[{index}].images")
        if message.role == "tool":
            converted.append(_answer(index, message, open_calls))
            continue
        calls = [_call(call) for call in message.tool_calls or []]
        if calls:
            open_calls = list(calls)
        converted.append(
            Message(role=message.role, content=message.content, tool_calls=calls or None)
        )
    turns = chat_prompt(converted)
    for turn, message in zip(turns, messages, strict=True):
        if message.thinking:
            turn["reasoning_content"] = message.thinking
    return turns


def _call(call: OllamaToolCall) -> ToolCall:
    """Return a call with its arguments as JSON text."""
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return ToolCall(call.id or new_call_id(), FunctionCall(call.function.name, arguments))


def _answer(index: int, message: OllamaMessage, open_calls: list[ToolCall]) -> Message:
    """Return the turn of a tool, and remove its call from the open ones."""
    for call in open_calls:
        if message.tool_call_id:
            is_answered = call.id == message.tool_call_id
        else:
            is_answered = message.tool_name in (None, "", call.function.name)
        if is_answered:
            open_calls.remove(call)
            return Message(
                role="tool",
                content=message.content,
                name=call.function.name,
                tool_call_id=call.id,
            )
    names = [call.function.name for call in open_calls]
    raise invalid(
        f"messages[{index}] is the answer of a tool, but answers no call"
        f" (tool_name: {message.tool_name!r}, tool_call_id: {message.tool_call_id!r}); the open"
        f" calls before it are of {names}",
        "messages",
    )
