"""Ollama's endpoints that describe the model, and those that are not offered.

First the answer bodies of Ollama's API, and its errors.
"""

from datetime import datetime, timezone
from typing import Any

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from http_proc.apis.ollama_requests import OllamaShowRequest
from http_proc.core.call import Call
from http_proc.core.errors import ApiError, QueueHint, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.streaming import EventSink
from http_proc.generation.sampling import convert
from http_proc.web.exchange import GATEWAY, json_response
from quadriga.client.types import Completion, LikelyToken, TokenLogprob
from quadriga.server.answer_format import from_info
from quadriga.server.model_info import ModelDetails, details_from_info


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
    """Return logprobs in Ollama's format: one object for each token."""
    return [_entry(token) | {"top_logprobs": list(map(_entry, token.top))} for token in tokens]


def _entry(token: TokenLogprob | LikelyToken) -> dict[str, Any]:
    data = token.bytes
    return {"token": data.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(data)}


def _nanoseconds(begin: float, end: float) -> int:
    """Return the time between two stages; 0 if one of them was not reached."""
    return max(0, round((end - begin) * 1e9)) if begin and end else 0


# The version of Ollama whose fields this API has; clients compare it with what they need.
API_VERSION = "0.12.11"
TAG = ":latest"
# The model is never unloaded.
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
    "embed": "this server computes no embeddings: use a server of an embedding model",
    "embeddings": "this server computes no embeddings: use a server of an embedding model",
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
    """The one model that is served."""

    models: list[OllamaModel]


class OllamaLoadedModel(msgspec.Struct):
    """The model that is loaded. size_vram: 0 without a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaModelDetails
    size_vram: int
    context_length: int
    expires_at: str = NEVER


class OllamaLoadedModels(msgspec.Struct):
    """The one model that is served."""

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


def check_ollama_model(gateway: Gateway, name: str) -> None:
    """Raise a 404 for a model that is not served; the tag "latest" may be left out or added."""
    if not name:
        raise invalid(f"model is missing: use {gateway.model!r}", "model")
    gateway.check_model(gateway.model if _untagged(name) == _untagged(gateway.model) else name)


def _untagged(name: str) -> str:
    return name.removesuffix(TAG)


async def tags(request: web.Request) -> web.Response:
    """List the one model that is served."""
    gateway = request.app[GATEWAY]
    known = await _details(gateway)
    name = _untagged(gateway.model) + TAG
    model = OllamaModel(
        name, name, _modified_at(gateway, known), known.num_bytes, known.digest, _stored(known)
    )
    return json_response(OllamaModelList([model]))


async def show(gateway: Gateway, call: Call, _: EventSink) -> OllamaShowAnswer:
    """Describe the model that is served."""
    fields = convert(await call.parse(), OllamaShowRequest)
    check_ollama_model(gateway, fields.model or fields.name)
    info, known = await gateway.ring_info.static(), await _details(gateway)
    return OllamaShowAnswer(
        _stored(known),
        _model_info(gateway.model, known, info["context_length"]),
        _capabilities(info),
        _modified_at(gateway, known),
    )


async def ps(request: web.Request) -> web.Response:
    """List the model that is loaded, which is the one that is served."""
    gateway = request.app[GATEWAY]
    info, known = await gateway.ring_info.static(), await _details(gateway)
    name = _untagged(gateway.model) + TAG
    on_gpu = str(info.get("device", "")).startswith("cuda")
    loaded = OllamaLoadedModel(
        name,
        name,
        known.num_bytes,
        known.digest,
        _stored(known),
        known.num_bytes if on_gpu else 0,
        info["context_length"],
    )
    return json_response(OllamaLoadedModels([loaded]))


async def version(_: web.Request) -> web.Response:
    """Return the version of Ollama whose API this server has."""
    return json_response(OllamaVersion())


async def absent(request: web.Request) -> web.Response:
    """Refuse what this server does not do, and say what to do instead."""
    reason = ABSENT[request.path.rsplit("/", 1)[-1]]
    raise ApiError(501, f"{request.path}: {reason}", "not_supported", code="not_supported")


async def _details(gateway: Gateway) -> ModelDetails:
    return details_from_info((await gateway.ring_info.static())["model_details"])


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
        "completion": True,
        "tools": info["chat"] and answer_format.calls is not None,
        "thinking": answer_format.reasoning is not None,
        "insert": info["fill_format"] is not None,
    }
    return [name for name, is_offered in offered.items() if is_offered]
