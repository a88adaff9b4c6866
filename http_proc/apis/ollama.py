"""Ollama's API: POST /api/chat and POST /api/generate, and what describes the model.

First the bodies of requests, with messages and options; then answers and errors; then the endpoints
that describe the model, and those that are not offered; then the handlers that generate. The
docstrings of bodies are the descriptions in /openapi.json.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ParsedCall,
    ReasoningDelta,
    TextDelta,
    new_call_id,
)
from http_proc.answer.parser import ToolSchemas
from http_proc.apis.keep_alive import KeepAlive, expires_at, kept_alive, load_or_unload
from http_proc.core.call import Call
from http_proc.core.errors import ApiError, QueueHint, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import LOADED, ServedModel
from http_proc.core.streaming import JSON_LINES, EventSink
from http_proc.generation.chat_answers import (
    ChatAnswer,
    ChatRenderer,
    collect_chat,
    stream_chat,
)
from http_proc.generation.chat_call import ChatCall, ReasoningOptions, chat_prompt, check_counts
from http_proc.generation.logprobs import chat_logprobs
from http_proc.generation.prepare import AnswerReader, PreparedChat, prepare_chat
from http_proc.generation.sampling import (
    ANY_OBJECT,
    Sampling,
    convert,
    fill_format,
    fill_params,
    lenient,
    with_grammar,
)
from http_proc.generation.schema import FunctionCall, Message, RequestBody, Tool, ToolCall, Top
from http_proc.web.endpoint import LINES, Endpoint, answering, generating
from http_proc.web.exchange import GATEWAY, json_response
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import (
    NO_CHAT_OPTIONS,
    Chat,
    Completion,
    Prompt,
    StreamChunk,
    TokenLogprob,
)
from quadriga.clock import now
from quadriga.sampling.params import MAX_SEED, SamplingParams
from quadriga.server.answer_format import AnswerFormat, from_info
from quadriga.server.model_info import ModelDetails, details_from_info

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
    logprob of each token, with top_logprobs top tokens. keep_alive: how long the model stays
    loaded without requests, in seconds or as a duration such as "5m"; 0: it is unloaded after this
    one, below 0: it stays. shift has no effect.
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
    """POST /api/chat. Without messages the model is loaded, or unloaded with keep_alive 0."""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: list[Tool] = msgspec.field(default_factory=list)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate.

    prompt: a turn of the user, which the chat template renders, with `system` before it. raw: the
    prompt is sent as it is, as it is to a model without a chat template. suffix: the text after the
    answer, for models that fill in the middle. context: the field `context` of an earlier answer,
    to continue from there; an empty list asks for one. Without a prompt the
    model is loaded, or unloaded with keep_alive 0.
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
_OPTION_FIELDS = {field.name: field.type for field in msgspec.structs.fields(OllamaOptions)}
_INTEGERS = {name for name, kind in _OPTION_FIELDS.items() if "int" in str(kind)}
MAX_OPTION_CHARS = 64
# The request's name of each field of the server, for error messages.
OPTION_NAMES = {
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
        if name not in _OPTION_FIELDS:
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
    fields = _given(call.options, context_length)
    if call.logprobs:
        fields["logprobs"] = call.top_logprobs
    sampling = Sampling(SamplingParams(**fields), dict(OPTION_NAMES))
    return with_grammar(sampling, "format", _grammar(call.format))


def _given(options: OllamaOptions, context_length: int) -> dict[str, Any]:
    if options.typical_p not in (None, 1.0):
        raise invalid(
            f"options.typical_p is {options.typical_p}: only 1, which is off, is supported; leave"
            " it out",
            "options.typical_p",
        )
    given = {field: getattr(options, name) for name, field in OPTIONS.items()}
    if (num_tokens := given["max_new_tokens"]) is not None and num_tokens < 1:
        given["max_new_tokens"] = context_length  # the server clamps it to what is left
    if (seed := given["seed"]) is not None and seed < 0:
        given["seed"] = None
    return {field: value for field, value in given.items() if value is not None}


def _grammar(wanted: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(wanted, dict):
        return {"json_schema": lenient(wanted)}
    return {"json_schema": ANY_OBJECT} if wanted == "json" else {}


def length_options(call: OllamaRequest) -> RequestOptions:
    """Return the options of the server that fit prompt and answer into the context.

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
            converted.append(_answer_of_tool(index, message, open_calls))
            continue
        calls = [_tool_call(call) for call in message.tool_calls or []]
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


def _tool_call(call: OllamaToolCall) -> ToolCall:
    """Return a call with its arguments as JSON text."""
    arguments = msgspec.json.encode(call.function.arguments).decode()
    return ToolCall(call.id or new_call_id(), FunctionCall(call.function.name, arguments))


def _answer_of_tool(index: int, message: OllamaMessage, open_calls: list[ToolCall]) -> Message:
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


class OllamaError(QueueHint):
    """The body of an answer with an error status, and the last line of a stream that fails."""

    error: str


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """Fields of every answer, and of every line of a stream; the numbers are in the last line.

    done_reason: stop, length, abort or load. The durations are in nanoseconds: of the request, of
    loading the model (0), of the prompt's computation after its time in the queue, and of the
    generation.
    """

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[dict[str, Any]] | UnsetType = UNSET

    def end(self, completion: Completion, _: list[int] | None = None) -> None:
        """Add the reason of the end, and the numbers. The second argument: the prompt's ids."""
        times, usage = completion.timings, completion.usage
        self.done, self.done_reason = True, completion.finish_reason
        self.total_duration = _nanoseconds(times.submitted, times.delivered)
        self.load_duration = 0
        self.prompt_eval_count = usage.prompt_tokens
        self.prompt_eval_duration = _nanoseconds(times.admitted, times.first_token)
        self.eval_count = usage.completion_tokens
        self.eval_duration = _nanoseconds(times.first_token, times.detokenized)


class OllamaCalledFunction(msgspec.Struct):
    """The function of a call. index: number of the call in the answer."""

    index: int
    name: str
    arguments: Any


class OllamaCall(msgspec.Struct):
    """A call by the model."""

    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The assistant's turn, or a piece of it. A call is in one piece."""

    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    """The response of POST /api/chat."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    """The response of POST /api/generate.

    context: token ids of the prompt and of the answer, if the request has the field.
    """

    response: str = ""
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET

    def end(self, completion: Completion, prompt_ids: list[int] | None = None) -> None:
        """Add the reason of the end, the numbers and the context, if the prompt's ids are given."""
        OllamaAnswer.end(self, completion)
        if prompt_ids is not None:
            self.context = [*prompt_ids, *completion.token_ids]


def error_body(error: ApiError) -> bytes:
    """Return an error in Ollama's format."""
    body = OllamaError(error.answer.error.message)
    body.take_hint(error.answer.error)
    return msgspec.json.encode(body)


def rfc3339(seconds: float) -> str:
    """Return a Unix time as RFC 3339 writes it."""
    text = datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


def ollama_logprobs(tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Return logprobs in Ollama's format: one object for each token, as in OpenAI's chats."""
    content: list[dict[str, Any]] = chat_logprobs(tokens)["content"]
    return content


def _nanoseconds(begin: float, end: float) -> int:
    """Return the time between two stages; 0 if one of them was not reached."""
    return max(0, round((end - begin) * 1e9)) if begin and end else 0


# The version of Ollama whose fields this API has; clients compare it with what they need.
API_VERSION = "0.12.11"
TAG = ":latest"
# Of what /api/ps says of a model's requests.
INFO_MAX_AGE_S = 0.5
# The model is not unloaded.
NEVER = "9999-12-31T23:59:59Z"
# Ollama's name of a dimension in model_info -> Hugging Face's.
DIMENSIONS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
ABSENT = {
    "pull": "this server loads no models while it runs: start it with --model NAME",
    "push": "this server publishes no models: upload the files to the Hub",
    "create": "this server makes no models: start it with --model FILE.gguf or a directory",
    "copy": "this server copies no models: start it with --served-model-name for another name",
    "delete": "this server deletes no models: stop it and remove the files",
}


class OllamaModelDetails(msgspec.Struct):
    """How a model is stored."""

    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    parent_model: str = ""


class OllamaModel(msgspec.Struct):
    """The model in the list. size: bytes of the weights in the files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaModelDetails


class OllamaModelList(msgspec.Struct):
    """The models that are served."""

    models: list[OllamaModel]


class OllamaLoadedModel(msgspec.Struct):
    """A model that is loaded.

    size: bytes of its memory. size_vram: 0 without a GPU. expires_at: when it is unloaded if no
    request comes.
    """

    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    size_vram: int
    context_length: int
    expires_at: str = NEVER


class OllamaLoadedModels(msgspec.Struct):
    """The models that are loaded."""

    models: list[OllamaLoadedModel]


class OllamaShowAnswer(msgspec.Struct):
    """The response of POST /api/show. license, modelfile, parameters, template: not known."""

    details: OllamaModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    license: str = ""
    modelfile: str = ""
    parameters: str = ""
    template: str = ""


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this server has."""

    version: str = API_VERSION


def ollama_model(gateway: Gateway, call: Call, name: str) -> ServedModel:
    """Return the model of this name; the tag "latest" may be left out or added.

    Raises:
        ApiError: the name is empty, or 404: no model is called so.
    """
    if not name:
        raise invalid(f"model is missing: {gateway.models.advice()}", "model")
    spellings = (name, _untagged(name), _untagged(name) + TAG)
    known = next(filter(gateway.models.find, spellings), name)
    return gateway.served(known, call.record)


def _untagged(name: str) -> str:
    return name.removesuffix(TAG)


async def tags(request: web.Request) -> web.Response:
    """List the models that are served."""
    gateway = request.app[GATEWAY]

    async def listed(model: ServedModel) -> OllamaModel:
        known, name = await _details(model), _untagged(model.name) + TAG
        modified_at = _modified_at(gateway, known)
        return OllamaModel(name, name, modified_at, known.num_bytes, known.digest, _stored(known))

    return json_response(OllamaModelList(await gateway.models.known(listed)))


async def show(gateway: Gateway, call: Call, _: EventSink) -> OllamaShowAnswer:
    """Describe a model."""
    fields = convert(await call.parse(), OllamaShowRequest)
    model = ollama_model(gateway, call, fields.model or fields.name)
    info, known = await model.server_info.static(), await _details(model)
    return OllamaShowAnswer(
        _stored(known),
        _model_info(model.name, known, info["context_length"]),
        _capabilities(info),
        _modified_at(gateway, known),
    )


async def ps(request: web.Request) -> web.Response:
    """List the models that are loaded."""
    gateway = request.app[GATEWAY]
    known = await gateway.models.known(lambda model: _loaded(gateway, model))
    return json_response(OllamaLoadedModels([model for model in known if model is not None]))


async def _loaded(gateway: Gateway, model: ServedModel) -> OllamaLoadedModel | None:
    """Return what is shown of a model; None: it is not loaded."""
    info, known = await model.server_info.current(INFO_MAX_AGE_S), await _details(model)
    if model.state != LOADED:
        return None
    name = _untagged(model.name) + TAG
    is_busy = bool(info.get("open_requests")) or gateway.num_open_of(model) > 0
    ends_at, num_bytes = expires_at(model, is_busy), model.load.num_bytes or known.num_bytes
    on_gpu = str(info.get("device", "")).startswith("cuda")
    return OllamaLoadedModel(
        name,
        name,
        num_bytes,
        known.digest,
        _stored(known),
        num_bytes if on_gpu else 0,
        info["context_length"],
        NEVER if math.isinf(ends_at) else rfc3339(ends_at),
    )


async def version(_: web.Request) -> web.Response:
    """Return the version of Ollama whose API this server has."""
    return json_response(OllamaVersion())


async def absent(request: web.Request) -> web.Response:
    """Refuse what this server does not do, and say what to do instead."""
    reason = ABSENT[request.path.rsplit("/", 1)[-1]]
    raise ApiError(501, f"{request.path}: {reason}", "not_supported", code="not_supported")


async def _details(model: ServedModel) -> ModelDetails:
    return details_from_info((await model.server_info.static())["model_details"])


def _modified_at(gateway: Gateway, known: ModelDetails) -> str:
    return rfc3339(known.modified_at or gateway.started_at)


def _stored(known: ModelDetails) -> OllamaModelDetails:
    return OllamaModelDetails(
        known.container,
        known.family,
        [known.family],
        parameter_size(known.num_parameters),
        known.weight_format,
    )


def parameter_size(number: int) -> str:
    """Return a number of parameters as Ollama writes it: 134.52M, 8.0B."""
    if number >= 1_000_000_000:
        return f"{number / 1e9:.1f}B"
    return f"{number / 1e6:.2f}M" if number >= 1_000_000 else f"{number / 1e3:.2f}K"


def _model_info(model: str, known: ModelDetails, context_length: int) -> dict[str, Any]:
    family = known.family or "unknown"
    dimensions = {
        f"{family}.{name}": known.dimensions[other]
        for name, other in DIMENSIONS.items()
        if other in known.dimensions
    }
    return {
        "general.architecture": family,
        "general.basename": model,
        "general.parameter_count": known.num_parameters,
        f"{family}.context_length": context_length,
        **dimensions,
    }


def _capabilities(info: dict[str, Any]) -> list[str]:
    answer_format = from_info(info["answer_format"])
    offered = {
        "completion": not info.get("encoder"),
        "embedding": bool(info.get("embeddings")),
        "tools": info["chat"] and answer_format.calls is not None,
        "thinking": answer_format.reasoning is not None,
        "insert": info["fill_format"] is not None,
    }
    return [name for name, is_offered in offered.items() if is_offered]


_encode = msgspec.json.encode


@dataclass(slots=True)
class OllamaPiece:
    """A piece of an answer. calls: complete calls, whose arguments are JSON."""

    text: str = ""
    thinking: str = ""
    calls: list[OllamaCall] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether the piece adds nothing."""
        return not (self.text or self.thinking or self.calls)


# Make a body of the model's name, the time and a piece.
MakeAnswer = Callable[[str, str, OllamaPiece], OllamaAnswer]


def chat_answer(model: str, created_at: str, piece: OllamaPiece) -> OllamaAnswer:
    """Return a body of /api/chat."""
    message = OllamaAnswerMessage(
        role="assistant", content=piece.text, thinking=piece.thinking, tool_calls=piece.calls
    )
    return OllamaChatAnswer(model=model, created_at=created_at, message=message)


def generate_answer(model: str, created_at: str, piece: OllamaPiece) -> OllamaAnswer:
    """Return a body of /api/generate."""
    return OllamaGenerateAnswer(
        model=model,
        created_at=created_at,
        response=piece.text,
        thinking=piece.thinking or msgspec.UNSET,
    )


async def loaded_answer(
    gateway: Gateway, model: ServedModel, fields: OllamaRequest, make: MakeAnswer
) -> OllamaAnswer:
    """Answer a request without input, by which clients load and unload a model."""
    reason = await load_or_unload(gateway, model, fields.keep_alive)
    body = make(fields.model, rfc3339(now()), OllamaPiece())
    body.done, body.done_reason = True, reason
    return body


class PieceReader:
    """Collect the events of an answer into pieces, in which every call is whole."""

    def __init__(self) -> None:
        self._call: ParsedCall | None = None
        self._num_calls = 0

    def read(self, events: Iterable[AnswerEvent]) -> OllamaPiece:
        """Return what the next events add."""
        piece = OllamaPiece()
        for event in events:
            match event:
                case TextDelta():
                    piece.text += event.text
                case ReasoningDelta():
                    piece.thinking += event.text
                case CallBegin():
                    self._call = ParsedCall(event.id, event.name)
                case ArgumentsDelta() if self._call is not None:
                    self._call.arguments += event.text
                case CallEnd() if self._call is not None:
                    self._call.is_complete = True
                    self.add(piece, self._call)
                    self._call = None
        return piece

    def rest(self) -> OllamaPiece:
        """Return the call that was cut off, if there is one."""
        piece, call = OllamaPiece(), self._call
        if call is not None:
            self.add(piece, call)
        return piece

    def add(self, piece: OllamaPiece, call: ParsedCall) -> None:
        """Add a call to a piece; as text if it was cut off or its arguments are no JSON object."""
        arguments = _arguments(call)
        if arguments is None:
            name = _encode(call.name).decode()
            piece.text += f'{{"name": {name}, "arguments": {call.arguments}'
            return
        function = OllamaCalledFunction(self._num_calls, call.name, arguments)
        piece.calls.append(OllamaCall(call.id, function))
        self._num_calls += 1


def _arguments(call: ParsedCall) -> dict[str, Any] | None:
    """Return the arguments of a call; None if it was cut off or they are no JSON object."""
    if not call.is_complete:
        return None
    try:
        return msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def whole_answer(
    model: str, answer: ChatAnswer, make: MakeAnswer, prompt_ids: list[int] | None = None
) -> OllamaAnswer:
    """Return the body of a whole answer. prompt_ids: for the field context of /api/generate."""
    parsed, completion = answer.parsed, answer.completion
    reader, piece = PieceReader(), OllamaPiece(parsed.text, parsed.reasoning)
    for call in parsed.calls:
        reader.add(piece, call)
    body = make(model, rfc3339(now()), piece)
    body.end(completion, prompt_ids)
    if completion.logprobs is not None:
        body.logprobs = ollama_logprobs(completion.logprobs)
    return body


class OllamaLines(ChatRenderer):
    """ChatRenderer of Ollama's streams: a line for each piece, and a last one with the numbers.

    Args:
        model: the name that the request has.
        make: makes the body of a piece.
        prompt_ids: token ids of the prompt, for the field context of /api/generate.
    """

    framing = JSON_LINES

    def __init__(self, model: str, make: MakeAnswer, prompt_ids: list[int] | None = None) -> None:
        self._model = model
        self._make = make
        self._prompt_ids = prompt_ids
        self._reader = PieceReader()

    def render(self, _: int, events: list[AnswerEvent], chunk: StreamChunk) -> bytes:
        """Return the lines of a chunk."""
        pieces, lines = [self._reader.read(events)], []
        if chunk.completion is not None:
            pieces.append(self._reader.rest())
        for piece in pieces:
            if not piece.is_empty:
                lines.append(self._body(piece))
        if chunk.logprobs:
            lines = lines or [self._body(OllamaPiece())]
            lines[0].logprobs = ollama_logprobs(chunk.logprobs)
        if chunk.completion is not None:
            last = self._body(OllamaPiece())
            last.end(chunk.completion, self._prompt_ids)
            lines.append(last)
        return b"".join(_encode(line) + b"\n" for line in lines)

    def error(self, error: ApiError) -> bytes:
        """Return the line of an error."""
        return error_body(error) + b"\n"

    def _body(self, piece: OllamaPiece) -> OllamaAnswer:
        return self._make(self._model, rfc3339(now()), piece)


async def ollama_chat_answer(gateway: Gateway, call: Call, sink: EventSink) -> OllamaAnswer | None:
    """Answer a chat, as a stream unless the request says otherwise."""
    body = await call.parse()
    check_counts(body)
    fields = convert(with_known_options(body), OllamaChatRequest)
    model = ollama_model(gateway, call, fields.model)
    if not fields.messages:
        return await loaded_answer(gateway, model, fields, chat_answer)
    info = await model.server_info.static()
    last = fields.messages[-1]
    chat = ChatCall(
        messages=ollama_chat(fields.messages),
        sampling=ollama_sampling(fields, info["context_length"]),
        tools=fields.tools,
        reasoning=ollama_reasoning(fields, info),
        continues_message=last.role == "assistant" and not last.tool_calls,
        stream=fields.stream,
    )
    asked = GeneratePrompt(chat.messages, await prepare_chat(gateway, model, chat))
    return await _answer(gateway, model, call, sink, fields, asked, chat_answer)


# The request's name of each field of the server, beside the options.
NAMES = {"prompt_token_ids": "context", "token_ids": "context"}
# Tokens at the end of a prompt in which the mark of the reasoning is searched for.
NUM_END_TOKENS = 32


@dataclass(frozen=True, slots=True)
class GeneratePrompt:
    """A prompt and how it is answered. ids: its token ids, if the answer has a context."""

    prompt: Prompt
    prepared: PreparedChat
    ids: list[int] | None = None


async def ollama_generate(gateway: Gateway, call: Call, sink: EventSink) -> OllamaAnswer | None:
    """Answer a prompt, as a stream unless the request says otherwise."""
    body = with_known_options(await call.parse())
    fields = convert(body, OllamaGenerateRequest)
    model = ollama_model(gateway, call, fields.model)
    _check_supported(fields)
    if not fields.prompt and not fields.suffix:
        return await loaded_answer(gateway, model, fields, generate_answer)
    asked = await _prompt(gateway, model, fields)
    return await _answer(gateway, model, call, sink, fields, asked, generate_answer)


async def _answer(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    sink: EventSink,
    fields: OllamaChatRequest | OllamaGenerateRequest,
    asked: GeneratePrompt,
    make: MakeAnswer,
) -> OllamaAnswer | None:
    """Answer a prompt in the form of an endpoint. `make`: makes the bodies."""
    prepared, head = asked.prepared, model.head(call, "ollama")
    options = prepared.options | length_options(fields)
    with (
        kept_alive(gateway, model, fields.keep_alive),
        gateway.open_group(model, head.id, prepared.names, call.record) as group,
    ):
        group.submit(asked.prompt, prepared.params, fields.stream, options)
        if fields.stream:
            lines = OllamaLines(fields.model, make, asked.ids)
            await stream_chat(sink, group, prepared, lines)
            return None
        (answer,) = await collect_chat(group, prepared)
    return whole_answer(fields.model, answer, make, asked.ids)


def _check_supported(fields: OllamaGenerateRequest) -> None:
    without_images(fields.images, "images")
    if fields.template:
        raise invalid(
            "template is not supported: the model's own chat template is used; render the prompt"
            " and send it with raw: true",
            "template",
        )
    for other in ("system", "context"):
        if fields.raw and getattr(fields, other):
            raise invalid(f"raw and {other} are both given: write {other} into the prompt", "raw")
    if fields.suffix and fields.context:
        raise invalid("suffix and context are both given: leave one out", "suffix")


async def _prompt(
    gateway: Gateway, model: ServedModel, fields: OllamaGenerateRequest
) -> GeneratePrompt:
    """Return the prompt as a chat, as it is, with a suffix, or after a context."""
    info = await model.server_info.static()
    sampling = ollama_sampling(fields, info["context_length"])
    if fields.suffix:
        known = fill_format(info, model.name, "suffix")
        filling = Sampling(fill_params(sampling.params, known), sampling.names)
        return _plain(known.prompt(fields.prompt, fields.suffix), filling)
    if fields.raw or not info["chat"]:
        if fields.system:
            raise invalid(
                f"system needs a chat template, and {model.name} has none: write it into the"
                " prompt",
                "system",
            )
        return await _with_context(model, fields, _plain(fields.prompt, sampling))
    turns: Chat = [{"role": "system", "content": fields.system}] if fields.system else []
    turns.append({"role": "user", "content": fields.prompt})
    call = ChatCall(
        messages=turns,
        sampling=sampling,
        reasoning=ollama_reasoning(fields, info),
        names={"messages": "prompt"},
    )
    prepared = await prepare_chat(gateway, model, call)
    return await _with_context(model, fields, GeneratePrompt(turns, prepared))


def _plain(prompt: str, sampling: Sampling) -> GeneratePrompt:
    """Return a prompt whose answer is text alone."""
    reader = AnswerReader(AnswerFormat(), ToolSchemas(), None, False, False, False)
    params: SamplingParams = sampling.params
    return GeneratePrompt(prompt, PreparedChat(params, {}, {**NAMES, **sampling.names}, reader))


async def _with_context(
    model: ServedModel, fields: OllamaGenerateRequest, asked: GeneratePrompt
) -> GeneratePrompt:
    """Return the prompt as token ids after those of the context, if the request has the field."""
    if fields.context is None:
        return asked
    prepared = asked.prepared
    chat = prepared.options.get("chat", NO_CHAT_OPTIONS)
    own_ids = await model.client.tokenize(asked.prompt, chat)
    ids = [*fields.context, *own_ids]
    text_end = await model.client.detokenize(own_ids[-NUM_END_TOKENS:], False)
    reader = replace(prepared.reader, text_end=text_end)
    names = {**prepared.names, **NAMES}
    return GeneratePrompt(ids, replace(prepared, options={}, names=names, reader=reader), ids)


_ERRORS: dict[str, Any] = {"error_body": error_body, "error": OllamaError}

OLLAMA_ENDPOINTS = [
    generating("/api/chat", ollama_chat_answer, "Answer a chat, in Ollama's format",
               OllamaChatRequest, OllamaChatAnswer, stream_type=LINES, **_ERRORS),
    generating("/api/generate", ollama_generate, "Answer a prompt, in Ollama's format",
               OllamaGenerateRequest, OllamaGenerateAnswer, stream_type=LINES, **_ERRORS),
    answering("/api/show", show, "Describe the model, in Ollama's format",
              OllamaShowRequest, OllamaShowAnswer, **_ERRORS),
    Endpoint("/api/tags", tags, "The model that is served, in Ollama's format",
             OllamaModelList, **_ERRORS),
    Endpoint("/api/ps", ps, "The models that are loaded, in Ollama's format",
             OllamaLoadedModels, **_ERRORS),
    Endpoint("/api/version", version, "The version of Ollama whose API this is",
             OllamaVersion, **_ERRORS),
    *(Endpoint(f"/api/{name}", absent, "Not offered", None,
               method="delete" if name == "delete" else "post", **_ERRORS)
      for name in ABSENT),
]  # fmt: skip
