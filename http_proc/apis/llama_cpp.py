"""llama.cpp's endpoints: POST /infill for editors, and GET /props, from which clients read limits.

The docstrings of the bodies are the descriptions in /openapi.json.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from http_proc.core.call import Call
from http_proc.core.errors import ApiError, QueueHint, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.streaming import EventSink, Renderer, collect, event, stream_events
from http_proc.generation.sampling import (
    convert,
    fill_format,
    fill_params,
    take_sampling,
    with_grammar,
)
from http_proc.generation.schema import RequestBody, Top
from http_proc.web.endpoint import Endpoint, generating
from http_proc.web.exchange import json_response, model_of
from quadriga import __version__
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.sampling.params import MAX_SEED, SamplingParams
from quadriga.server.model_info import ContextFile
from quadriga.wire.client import Accepted, Usage


class InfillFile(msgspec.Struct):
    """A file that gives context."""

    text: str
    filename: str = ""


class InfillRequest(RequestBody):
    """POST /infill.

    input_prefix, input_suffix: the texts before and after the gap. input_extra: other files, which
    come first. prompt: the begin of the text that fills the gap. response_fields: the fields of the
    answer to return; "a/b" is field b of a. n_predict: the largest number of tokens; below 0: the
    server's default. seed: below 0: drawn at random. n_probs: number of top tokens for each token.
    logit_bias: [[id, bias], …] or {id: bias}; false forbids a token. The sampling fields have the
    defaults of this server. The fields after logit_bias have no effect.
    """

    input_prefix: str
    input_suffix: str
    prompt: str = ""
    input_extra: list[InfillFile] = msgspec.field(default_factory=list)
    stream: bool = False
    response_fields: list[str] | None = None
    model: str | None = None
    n_predict: int = -1
    seed: Annotated[int, msgspec.Meta(le=MAX_SEED)] = -1
    grammar: str = ""
    n_probs: Top = 0
    logit_bias: list[tuple[int, float | bool]] | dict[str, float | bool] = msgspec.field(
        default_factory=list
    )
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_indent: int | None = None
    n_keep: int | None = None
    n_cache_reuse: int | None = None
    samplers: list[str] | str | None = None
    t_max_prompt_ms: float | None = None
    t_max_predict_ms: float | None = None
    repeat_last_n: int | None = None
    timings_per_token: bool | None = None
    return_tokens: bool | None = None


class InfillTimings(msgspec.Struct):
    """Numbers of tokens, and times of the prompt and of the answer in ms."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class InfillAnswer(msgspec.Struct, kw_only=True):
    """A text that fills the gap; the request may ask for some of the fields only.

    tokens_predicted: number of its tokens. tokens_evaluated: length of the prompt. tokens_cached:
    number of tokens of the prompt and of the text. stop_type: eos, word or limit.
    """

    content: str = ""
    tokens: list[int] = []
    model: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    tokens_cached: int = 0
    stop_type: Literal["eos", "word", "limit"] = "eos"
    stopping_word: str = ""
    timings: InfillTimings | msgspec.UnsetType = msgspec.UNSET
    completion_probabilities: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    truncated: bool = False
    has_new_line: bool = False
    stop: bool = True
    index: int = 0
    id_slot: int = 0


class DefaultSettings(msgspec.Struct):
    """n_ctx: largest number of tokens of a request, its answer included."""

    n_ctx: int


class Modalities(msgspec.Struct, frozen=True):
    """What a prompt may have beside text."""

    vision: bool = False
    audio: bool = False


class Props(msgspec.Struct):
    """The model and its limits. total_slots: largest number of requests that run at one time.

    model_alias, model_path: the name of the model.
    """

    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities = Modalities()
    build_info: str = f"quadriga {__version__}"


class LlamaCppError(QueueHint):
    """What went wrong. code: the HTTP status."""

    code: int
    message: str
    type: str


class LlamaCppErrorAnswer(msgspec.Struct):
    """The body of an answer with an error status, in llama.cpp's format."""

    error: LlamaCppError


def error_body(error: ApiError) -> bytes:
    """Return an error in llama.cpp's format."""
    body = error.answer.error
    detail = LlamaCppError(error.status, body.message, body.type)
    detail.take_hint(body)
    return msgspec.json.encode(LlamaCppErrorAnswer(detail))


_encode = msgspec.json.encode


def infill_answer(
    model: str, completion: Completion, params: SamplingParams, content: str
) -> InfillAnswer:
    """Return the answer to a completion with the given content."""
    usage, matched = completion.usage, completion.matched_stop
    word = matched if isinstance(matched, str) else ""
    answer = InfillAnswer(
        content=content,
        tokens=completion.token_ids,
        model=model,
        tokens_predicted=usage.completion_tokens,
        tokens_evaluated=usage.prompt_tokens,
        tokens_cached=usage.prompt_tokens + usage.completion_tokens,
        stop_type="limit" if completion.finish_reason == "length" else "word" if word else "eos",
        stopping_word=word,
        timings=_timings(completion.timings, usage),
        has_new_line="\n" in completion.text,
    )
    if params.logprobs is not None and completion.logprobs is not None:
        answer.completion_probabilities = _probabilities(completion)
    return answer


def _probabilities(completion: Completion) -> list[dict[str, Any]]:
    def entry(token_id: int, data: bytes, logprob: float | None) -> dict[str, Any]:
        text = data.decode("utf-8", "replace")
        return {"id": token_id, "token": text, "bytes": list(data), "logprob": logprob}

    return [
        entry(token.token_id, token.bytes, token.logprob)
        | {"top_logprobs": [entry(top.token_id, top.bytes, top.logprob) for top in token.top]}
        for token in completion.logprobs or []
    ]


def _timings(timings: Timings, usage: Usage) -> InfillTimings:
    prompt_ms = max(0.0, timings.first_token - timings.admitted) * 1000
    predicted_ms = max(0.0, timings.detokenized - timings.first_token) * 1000
    num_computed, num_new = usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens
    return InfillTimings(
        usage.cached_tokens,
        num_computed,
        prompt_ms,
        prompt_ms / max(1, num_computed),
        num_computed / prompt_ms * 1000 if prompt_ms else 0.0,
        num_new,
        predicted_ms,
        predicted_ms / max(1, num_new),
        num_new / predicted_ms * 1000 if predicted_ms else 0.0,
    )


def selected(answer: dict[str, Any], fields: list[str] | None) -> dict[str, Any]:
    """Return the asked-for fields of an answer, under the paths that the request names them by."""
    if not fields:
        return answer
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for key in path.split("/"):
            value = value.get(key, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            found[path] = value
    return found


class InfillStream(Renderer):
    """Renderer of /infill: an event for each chunk, then one with the numbers and no text."""

    def __init__(self, model: str, params: SamplingParams, fields: list[str] | None) -> None:
        self._model = model
        self._params = params
        self._fields = fields
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    def start(self, accepted: Sequence[Accepted]) -> bytes:
        """Note the length of the prompt."""
        self._num_prompt_tokens = accepted[0].num_prompt_tokens
        return b""

    def render(self, _: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk."""
        self._num_tokens += len(chunk.token_ids)
        pieces = []
        if chunk.text:
            part = {
                "index": 0,
                "content": chunk.text,
                "tokens": chunk.token_ids,
                "stop": False,
                "id_slot": 0,
                "tokens_predicted": self._num_tokens,
                "tokens_evaluated": self._num_prompt_tokens,
            }
            pieces.append(event(_encode(part)))
        if chunk.completion is not None:
            answer = infill_answer(self._model, chunk.completion, self._params, "")
            answer.tokens = []
            pieces.append(event(_encode(selected(msgspec.to_builtins(answer), self._fields))))
        return b"".join(pieces)

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(error_body(error))


# llama.cpp's names of the sampling fields -> SamplingParams' names. InfillRequest has those whose
# values differ.
LLAMA_CPP = {name: name for name in (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop",
    "ignore_eos", "json_schema",
)} | {"repeat_penalty": "repetition_penalty"}  # fmt: skip
# The request's name of each field of the server, beside the sampling fields.
NAMES = {"prompt": "input_prefix", "max_new_tokens": "n_predict", "logprobs": "n_probs"}


async def infill(gateway: Gateway, call: Call, sink: EventSink) -> dict[str, Any] | None:
    """Return the text between a prefix and a suffix."""
    body = await call.parse()
    sampling = take_sampling(body, LLAMA_CPP, {})
    fields = convert(body, InfillRequest)
    model = gateway.served(fields.model, call.record)
    sampling = with_grammar(sampling, "grammar", {"ebnf": fields.grammar} if fields.grammar else {})
    known = fill_format(await model.server_info.static(), model.name, "input_suffix")
    files = [ContextFile(file.filename, file.text) for file in fields.input_extra]
    prompt = known.prompt(fields.input_prefix, fields.input_suffix, files) + fields.prompt
    params = fill_params(_params(sampling.params, fields), known)
    head = model.head(call, "infill")
    names = {**NAMES, **sampling.names}
    with gateway.open_group(model, head.id, names, call.record) as group:
        group.submit(prompt, params, fields.stream, {})
        if fields.stream:
            renderer = InfillStream(head.model, params, fields.response_fields)
            await stream_events(sink, group, renderer)
            return None
        (completion,) = await collect(group)
    answer = infill_answer(head.model, completion, params, completion.text)
    return selected(msgspec.to_builtins(answer), fields.response_fields)


def _params(params: SamplingParams, call: InfillRequest) -> SamplingParams:
    """Return the parameters with those whose values llama.cpp writes otherwise."""
    return msgspec.structs.replace(
        params,
        max_new_tokens=call.n_predict if call.n_predict >= 0 else None,
        seed=call.seed if call.seed >= 0 else None,
        logprobs=call.n_probs or None,
        logit_bias=_logit_bias(call),
    )


def _logit_bias(call: InfillRequest) -> dict[int, float]:
    given = call.logit_bias
    pairs = given.items() if isinstance(given, dict) else given
    try:
        return {int(key): -100.0 if bias is False else float(bias) for key, bias in pairs}
    except ValueError:
        raise invalid(
            f"logit_bias has a key that is no token id: {list(dict(pairs))}; write ids",
            "logit_bias",
        ) from None


async def props(request: web.Request) -> web.Response:
    """Return the limits of a model."""
    model = model_of(request)
    info = await model.server_info.static()
    settings = DefaultSettings(info["context_length"])
    return json_response(Props(settings, info["max_running_requests"], model.name, model.name))


LLAMA_CPP_ENDPOINTS = [
    Endpoint("/props", props, "The model and its limits, in llama.cpp's format", Props),
    generating("/infill", infill, "Fill the gap between two texts, in llama.cpp's format",
               InfillRequest, InfillAnswer, sampling=LLAMA_CPP,
               error_body=error_body, error=LlamaCppErrorAnswer),
]  # fmt: skip
