"""Vectors of texts, in the formats of OpenAI, text-embeddings-inference, Cohere and Ollama.

First the bodies, whose docstrings are the descriptions in /openapi.json; then what all endpoints
share, and their functions.
"""

import base64
import operator
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from http_proc.apis.keep_alive import KeepAlive, kept_alive
from http_proc.apis.ollama import OllamaError, error_body, ollama_model
from http_proc.apis.openai import list_prompts
from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ServedModel
from http_proc.core.streaming import EventSink
from http_proc.generation.chat_call import chat_prompt
from http_proc.generation.sampling import convert
from http_proc.generation.schema import Message, Priority, RequestBody
from http_proc.generation.vectors import check_count, cut_to, vectors
from http_proc.web.endpoint import answering
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, Prompt
from quadriga.sampling.pooling import Pooling

MAX_TEXTS = 8192  # of one request
# Names of prompts that models have for Cohere's types of inputs.
_INPUT_TYPES = {"search_query": ("query",), "search_document": ("document", "passage")}
NAMES = {"prompt": "input", "prompt_token_ids": "input", "pooling": "model"}

Texts = str | list[str | int | list[int]]


class EmbeddingRequest(RequestBody, kw_only=True):
    """POST /v1/embeddings.

    input: a text, token ids, or a list of either; or messages: a chat, in vLLM's format.
    dimensions: keep the first numbers only. encoding_format: float, or base64 of little-endian
    float32. truncate_prompt_tokens: cut a text to so many tokens; -1: to the model's context.
    normalize: divide each vector by its length. prompt_name: the model's prompt that is put before
    each text; left out: its default one, if it has one. user has no effect but in the usage log.
    """

    input: Texts | None = None
    messages: list[Message] | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: int | None = None
    normalize: bool = True
    prompt_name: str | None = None
    priority: Priority = 0
    user: str | None = None


class EmbeddingUsage(msgspec.Struct):
    """Numbers of tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(msgspec.Struct):
    """One vector: numbers, or base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingAnswer(msgspec.Struct):
    """The vectors, in the order of the texts."""

    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


class TeiEmbedRequest(RequestBody, kw_only=True):
    """POST /embed, in the format of text-embeddings-inference.

    inputs: a text, token ids, or a list of either. truncate: cut long texts at their end.
    prompt_name: as in /v1/embeddings. model: of a server with several.
    """

    inputs: Texts
    model: str | None = None
    normalize: bool = True
    prompt_name: str | None = None
    truncate: bool = False
    truncation_direction: Literal["Right", "right"] = "Right"
    dimensions: int | None = None


class SimilarTexts(RequestBody, kw_only=True):
    """A text, and texts that are compared with it."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(RequestBody, kw_only=True):
    """How texts are encoded, as in /embed."""

    truncate: bool = False
    truncation_direction: Literal["Right", "right"] = "Right"
    prompt_name: str | None = None


class SimilarityRequest(RequestBody, kw_only=True):
    """POST /similarity, in the format of text-embeddings-inference.

    The answer has the cosine of the first text's vector with that of each other text, in order.
    """

    inputs: SimilarTexts
    parameters: SimilarityParameters | None = None
    model: str | None = None


class CohereContent(RequestBody, kw_only=True):
    """A part of an input. type: text."""

    type: Literal["text"]
    text: str


class CohereInput(RequestBody, kw_only=True):
    """A text of one or several parts."""

    content: list[CohereContent]


CohereType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class CohereEmbedRequest(RequestBody, kw_only=True):
    """POST /v2/embed, in Cohere's format.

    texts: the texts; or inputs: lists of their parts, which are put together. input_type chooses
    the model's prompt of this name, or for search_query and search_document of the name query,
    document or passage; without such a prompt it has no effect. int8 and uint8: 127 times the
    numbers, rounded. binary and ubinary: a bit for each number, 1 above 0. max_tokens: cut each
    text to so many tokens. truncate: END cuts long texts, NONE refuses them.
    """

    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    model: str | None = None
    input_type: str | None = None
    embedding_types: list[CohereType] = msgspec.field(default_factory=lambda: ["float"])
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: Literal["NONE", "END"] = "END"
    priority: Priority = 0


class CohereEmbedAnswer(msgspec.Struct):
    """The vectors by type, in the order of the texts."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"


class CohereEmbedV1Request(CohereEmbedRequest, kw_only=True):
    """POST /v1/embed, Cohere's older endpoint: as /v2/embed, and without types a list of vectors.

    embedding_types: as in /v2/embed; left out: the answer has a list of vectors.
    """

    embedding_types: list[CohereType] | None = None  # type: ignore[assignment]


class CohereFloatsAnswer(msgspec.Struct):
    """The vectors, in the order of the texts."""

    id: str
    embeddings: list[list[float]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_floats"


class OllamaEmbedRequest(RequestBody, kw_only=True):
    """POST /api/embed.

    truncate: cut long texts. keep_alive: as in /api/chat. options has no effect.
    """

    input: str | list[str]
    model: str
    truncate: bool = True
    dimensions: int | None = None
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbedAnswer(msgspec.Struct):
    """The vectors, in the order of the texts. Durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class OllamaEmbeddingsRequest(RequestBody, kw_only=True):
    """POST /api/embeddings, Ollama's older endpoint: one text, whose vector is not normalized."""

    prompt: str
    model: str
    options: dict[str, Any] | None = None
    keep_alive: KeepAlive | None = None


class OllamaEmbeddingsAnswer(msgspec.Struct):
    """The vector of the text."""

    embedding: list[float]


# What all endpoints share.


async def embed(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    prompts: Sequence[Prompt],
    pooling: Pooling,
    options: RequestOptions,
    field: str,
    is_list: bool = True,
    cut_by: str = "truncate",
) -> list[Completion]:
    """Return the completions of texts, which have their vectors, in order.

    Args:
        gateway: its state.
        model: makes the vectors.
        call: what is answered.
        prompts: the texts.
        pooling: what vectors are asked for.
        options: of each request to the server.
        field: the request's name of the texts, for errors.
        is_list: the field is a list of these texts.
        cut_by: the request's field that lets long texts be cut, for errors.

    Raises:
        ApiError: there are too many texts, or the server refuses one of them.
    """
    check_count(field, len(prompts), MAX_TEXTS, "texts")
    head = model.head(call, "embd")
    names = {**NAMES, "prompt": field, "prompt_token_ids": field, "truncate_prompt": cut_by}
    asked = [(prompt, pooling) for prompt in prompts]
    return await vectors(
        gateway, model, call, head.id, asked, options, names, texts_field=field if is_list else ""
    )


def vector_of(completion: Completion) -> "array[float]":
    """Return the vector of a completion."""
    assert completion.vector is not None
    return completion.vector


def _numbers(completion: Completion) -> list[float]:
    return vector_of(completion).tolist()


def _base64(completion: Completion) -> str:
    return base64.b64encode(vector_of(completion).tobytes()).decode()


def num_tokens_of(completions: Sequence[Completion]) -> int:
    """Return the number of tokens of all texts."""
    return sum(completion.usage.prompt_tokens for completion in completions)


# The endpoints.


async def openai_embeddings(gateway: Gateway, call: Call, _: EventSink) -> EmbeddingAnswer:
    """Return the vectors of texts in OpenAI's format."""
    fields = convert(await call.parse(), EmbeddingRequest)
    model = gateway.served(fields.model, call.record)
    most = cut_to(fields.truncate_prompt_tokens)
    prompts = _prompts_of(fields)
    pooling = Pooling(
        normalize=fields.normalize,
        dimensions=fields.dimensions,
        max_tokens=most,
        prompt_name=fields.prompt_name,
    )
    options: RequestOptions = {"priority": fields.priority}
    if fields.truncate_prompt_tokens is not None:
        options["truncate_prompt"] = True
    completions = await embed(
        gateway, model, call, prompts, pooling, options, "input", cut_by="truncate_prompt_tokens"
    )
    written = _base64 if fields.encoding_format == "base64" else _numbers
    data = [EmbeddingObject(number, written(one)) for number, one in enumerate(completions)]
    num_tokens = num_tokens_of(completions)
    return EmbeddingAnswer(data, model.name, EmbeddingUsage(num_tokens, num_tokens))


def _prompts_of(fields: EmbeddingRequest) -> list[Prompt]:
    """Return the texts of a request, or its chat. Raises ApiError."""
    if (fields.input is None) == (fields.messages is None):
        raise invalid("give either input or messages", "input")
    if fields.messages is not None:
        return [chat_prompt(fields.messages)]
    assert fields.input is not None
    return list_prompts(fields.input, "input")


async def tei_embed(gateway: Gateway, call: Call, _: EventSink) -> list[list[float]]:
    """Return the vectors of texts in the format of text-embeddings-inference."""
    return await vectors_of(gateway, call, await call.parse())


async def vectors_of(gateway: Gateway, call: Call, body: dict[str, Any]) -> list[list[float]]:
    """Return the vectors of the texts in a body of /embed."""
    fields = convert(body, TeiEmbedRequest)
    model = gateway.served(fields.model, call.record)
    pooling = Pooling(
        normalize=fields.normalize, dimensions=fields.dimensions, prompt_name=fields.prompt_name
    )
    options: RequestOptions = {"truncate_prompt": fields.truncate}
    prompts = list_prompts(fields.inputs, "inputs")
    return list(
        map(_numbers, await embed(gateway, model, call, prompts, pooling, options, "inputs"))
    )


async def tei_similarity(gateway: Gateway, call: Call, _: EventSink) -> list[float]:
    """Return the cosines of a text with others, in the format of text-embeddings-inference."""
    return await cosines_of(gateway, call, await call.parse())


async def cosines_of(gateway: Gateway, call: Call, body: dict[str, Any]) -> list[float]:
    """Return the cosines of the texts in a body of /similarity."""
    fields = convert(body, SimilarityRequest)
    check_count("inputs.sentences", len(fields.inputs.sentences), MAX_TEXTS - 1, "texts")
    parameters = fields.parameters or SimilarityParameters()
    options: RequestOptions = {"truncate_prompt": parameters.truncate}
    pooling = Pooling(prompt_name=parameters.prompt_name)
    prompts: list[Any] = [fields.inputs.source_sentence, *fields.inputs.sentences]
    model = gateway.served(fields.model, call.record)
    completions = await embed(
        gateway, model, call, prompts, pooling, options, "inputs", is_list=False
    )
    source, *others = map(_numbers, completions)
    return [sum(map(operator.mul, source, other)) for other in others]


async def cohere_embed(gateway: Gateway, call: Call, _: EventSink) -> CohereEmbedAnswer:
    """Return the vectors of texts in Cohere's format."""
    fields = convert(await call.parse(), CohereEmbedRequest)
    return await _by_type(gateway, call, fields, fields.embedding_types)


async def cohere_embed_v1(
    gateway: Gateway, call: Call, _: EventSink
) -> CohereEmbedAnswer | CohereFloatsAnswer:
    """Return the vectors of texts in Cohere's older format."""
    fields = convert(await call.parse(), CohereEmbedV1Request)
    if fields.embedding_types is not None:
        return await _by_type(gateway, call, fields, fields.embedding_types)
    answer = await _by_type(gateway, call, fields, ["float"])
    return CohereFloatsAnswer(answer.id, answer.embeddings["float"], answer.texts, answer.meta)


async def _by_type(
    gateway: Gateway, call: Call, fields: CohereEmbedRequest, types: Sequence[CohereType]
) -> CohereEmbedAnswer:
    """Return the vectors of a request's texts by their types."""
    model = gateway.served(fields.model, call.record)
    known = (await model.server_info.static()).get("prompts") or ()
    names = (fields.input_type, *_INPUT_TYPES.get(fields.input_type or "", ()))
    pooling = Pooling(
        dimensions=fields.output_dimension,
        max_tokens=fields.max_tokens,
        prompt_name=next((name for name in names if name in known), None),
    )
    options: RequestOptions = {
        "priority": fields.priority,
        "truncate_prompt": fields.truncate == "END" or fields.max_tokens is not None,
    }
    if (fields.texts is None) == (fields.inputs is None):
        raise invalid("give either texts or inputs", "texts")
    texts = fields.texts
    if texts is None:
        texts = ["".join(part.text for part in each.content) for each in fields.inputs or ()]
    field = "inputs" if fields.texts is None else "texts"
    prompts: list[Any] = list(texts)
    completions = await embed(gateway, model, call, prompts, pooling, options, field)
    by_type: dict[str, list[Any]] = {
        kind: [_cohere_vector(kind, completion) for completion in completions] for kind in types
    }
    meta = {
        "api_version": {"version": "2"},
        "billed_units": {"input_tokens": num_tokens_of(completions)},
    }
    return CohereEmbedAnswer(call.record.id, by_type, texts, meta)


def _cohere_vector(kind: str, completion: Completion) -> list[float] | list[int] | str:
    vector = vector_of(completion)
    if kind == "float":
        return vector.tolist()
    if kind == "base64":
        return _base64(completion)
    if kind in ("int8", "uint8"):
        shift = 128 if kind == "uint8" else 0
        return [min(max(round(127 * number), -127), 127) + shift for number in vector]
    bits = "".join("1" if number > 0 else "0" for number in vector)
    bits += "0" * (-len(bits) % 8)
    packed = [int(bits[place : place + 8], 2) for place in range(0, len(bits), 8)]
    return packed if kind == "ubinary" else [byte - 128 for byte in packed]


async def ollama_embed(gateway: Gateway, call: Call, _: EventSink) -> OllamaEmbedAnswer:
    """Return the vectors of texts in Ollama's format."""
    fields = convert(await call.parse(), OllamaEmbedRequest)
    model = ollama_model(gateway, call, fields.model)
    pooling = Pooling(dimensions=fields.dimensions)
    prompts: list[Any] = [fields.input] if isinstance(fields.input, str) else list(fields.input)
    options: RequestOptions = {"truncate_prompt": fields.truncate}
    with kept_alive(gateway, model, fields.keep_alive):
        completions = await embed(gateway, model, call, prompts, pooling, options, "input")
    begin = min(completion.timings.submitted for completion in completions)
    end = max(completion.timings.delivered for completion in completions)
    return OllamaEmbedAnswer(
        fields.model,
        list(map(_numbers, completions)),
        max(0, round((end - begin) * 1e9)),
        num_tokens_of(completions),
    )


async def ollama_embeddings(gateway: Gateway, call: Call, _: EventSink) -> OllamaEmbeddingsAnswer:
    """Return the vector of one text in Ollama's older format."""
    fields = convert(await call.parse(), OllamaEmbeddingsRequest)
    model = ollama_model(gateway, call, fields.model)
    options: RequestOptions = {"truncate_prompt": True}
    pooling = Pooling(normalize=False)
    with kept_alive(gateway, model, fields.keep_alive):
        (completion,) = await embed(
            gateway, model, call, [fields.prompt], pooling, options, "prompt"
        )
    return OllamaEmbeddingsAnswer(_numbers(completion))


_OLLAMA_ERRORS: dict[str, Any] = {"error_body": error_body, "error": OllamaError}

EMBEDDING_ENDPOINTS = [
    answering("/v1/embeddings", openai_embeddings, "Vectors of texts",
              EmbeddingRequest, EmbeddingAnswer),
    answering("/embed", tei_embed, "Vectors of texts, in the format of text-embeddings-inference",
              TeiEmbedRequest, list[list[float]]),
    answering("/similarity", tei_similarity, "Cosines of a text with others, in the same format",
              SimilarityRequest, list[float]),
    answering("/v2/embed", cohere_embed, "Vectors of texts, in Cohere's format",
              CohereEmbedRequest, CohereEmbedAnswer),
    answering("/v1/embed", cohere_embed_v1, "The same, in Cohere's older format",
              CohereEmbedV1Request, CohereEmbedAnswer | CohereFloatsAnswer),
    answering("/api/embed", ollama_embed, "Vectors of texts, in Ollama's format",
              OllamaEmbedRequest, OllamaEmbedAnswer, **_OLLAMA_ERRORS),
    answering("/api/embeddings", ollama_embeddings, "The vector of a text, in Ollama's old format",
              OllamaEmbeddingsRequest, OllamaEmbeddingsAnswer, **_OLLAMA_ERRORS),
]  # fmt: skip
