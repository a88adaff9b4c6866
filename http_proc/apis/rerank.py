"""Scores of texts: ranks of documents, scores of pairs and labels, in the formats of other servers.

They are those of Cohere, Jina, text-embeddings-inference and vLLM. First the bodies, whose
docstrings are the descriptions in /openapi.json; then what all endpoints share, and their
functions.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from http_proc.apis.embeddings import (
    MAX_TEXTS,
    EmbeddingUsage,
    cosines_of,
    num_tokens_of,
    vector_of,
    vectors_of,
)
from http_proc.core.call import Call
from http_proc.core.errors import invalid
from http_proc.core.gateway import Gateway
from http_proc.core.served_model import ResponseHead, ServedModel
from http_proc.core.streaming import EventSink
from http_proc.generation.sampling import convert
from http_proc.generation.schema import Priority, RequestBody
from http_proc.generation.vectors import check_count, cut_to, vectors
from http_proc.web.endpoint import answering
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Completion, Prompt
from quadriga.sampling.pooling import (
    CLASSIFY,
    IDENTITY,
    PROBABILITIES,
    SCORE,
    SIGMOID,
    SOFTMAX,
    Pooling,
)

MAX_PAIR_TEXTS = 2
CUT_BY = "truncate_prompt_tokens"
_FUNCTIONS = {None: PROBABILITIES, "sigmoid": SIGMOID, "softmax": SOFTMAX, "none": IDENTITY}


class RerankDocument(RequestBody, kw_only=True):
    """A document to rank, as an object."""

    text: str


class RerankRequest(RequestBody, kw_only=True):
    """POST /rerank, /v1/rerank, /v2/rerank: rank documents, in the format of Cohere and Jina.

    documents: texts, or objects with a text. top_n: return so many, the best. return_documents:
    with their texts. max_tokens_per_doc, max_tokens_per_query: cut each document, and the query, to
    so many tokens. truncate: cut pairs that are longer than the model's context; false: refuse
    them. truncate_prompt_tokens: cut each pair to so many tokens; -1: to the context. instruction:
    what makes a document match, for a model that is instructed. use_activation: false returns the
    model's logits. With `texts` in place of `documents`, the format is that of
    text-embeddings-inference: raw_scores: logits. return_text: with the texts. truncate is then
    false by default. user has no effect but in the usage log.
    """

    query: str
    documents: list[str | RerankDocument] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    max_tokens_per_doc: int | None = None
    max_tokens_per_query: int | None = None
    truncate: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_direction: Literal["Right", "right"] = "Right"
    instruction: str | None = None
    use_activation: bool = True
    raw_scores: bool = False
    return_text: bool = False
    priority: Priority = 0
    user: str | None = None


class RankedDocument(msgspec.Struct, omit_defaults=True):
    """A document's number in the request, its score, and its text where the request asks for it."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankAnswer(msgspec.Struct):
    """The documents, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
    meta: dict[str, Any]


class TeiRankedText(msgspec.Struct, omit_defaults=True):
    """A text's number in the request, its score, and the text where the request asks for it."""

    index: int
    score: float
    text: str | None = None


class ScoreRequest(RequestBody, kw_only=True):
    """POST /score, /v1/score: scores of pairs of texts, in vLLM's format.

    text_1 and text_2, or queries and documents: a text or a list of texts each. A single first text
    is paired with every second one; two lists are paired one by one. truncate_prompt_tokens: cut
    each pair to so many tokens; -1: to the model's context. instruction: as in /rerank.
    use_activation: false returns the model's logits.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    instruction: str | None = None
    use_activation: bool = True
    priority: Priority = 0
    user: str | None = None


class PairScore(msgspec.Struct):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class ScoreAnswer(msgspec.Struct):
    """The scores, in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingUsage
    object: str = "list"


class ClassifyRequest(RequestBody, kw_only=True):
    """POST /classify: the labels of texts, in vLLM's format.

    input: a text or a list of texts. truncate_prompt_tokens: cut each to so many tokens; -1: to the
    model's context. use_activation: false returns the model's logits.
    """

    input: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool = True
    priority: Priority = 0
    user: str | None = None


class TextLabel(msgspec.Struct):
    """The likeliest label of a text, and the probabilities of all labels, in the model's order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct):
    """The labels, in the order of the texts."""

    id: str
    created: int
    model: str
    data: list[TextLabel]
    usage: EmbeddingUsage
    object: str = "list"


class PredictParameters(RequestBody, kw_only=True):
    """How a text's labels are returned."""

    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    top_k: int | None = None


class PredictRequest(RequestBody, kw_only=True):
    """POST /predict: the labels of texts, in the format of text-embeddings-inference.

    inputs: a text, or a list of two texts that are a pair, or a list of such lists: one text or a
    pair each. raw_scores: the model's logits. truncate: cut long texts. parameters: as the clients
    of the Hugging Face Hub send them: function_to_apply (sigmoid, softmax, none), and top_k, the
    number of labels, the likeliest ones. model: of a server with several.
    """

    inputs: str | list[str | list[str]]
    model: str | None = None
    raw_scores: bool = False
    truncate: bool = False
    truncation_direction: Literal["Right", "right"] = "Right"
    parameters: PredictParameters | None = None


class LabelScore(msgspec.Struct):
    """A label and its score."""

    score: float
    label: str


# What all endpoints share.


async def scores_of(
    gateway: Gateway,
    model: ServedModel,
    call: Call,
    asked: Sequence[tuple[str, Pooling]],
    options: RequestOptions,
    fields: tuple[str, str],
    prefix: str,
    cut_by: str = "truncate",
) -> tuple[ResponseHead, list[Completion]]:
    """Return the completions of texts or pairs, which have their scores, in order.

    Args:
        gateway: its state.
        model: scores the texts.
        call: what is answered.
        asked: the texts, or first texts of pairs, and what is asked of each.
        options: of each request to the server.
        fields: the request's names of the first and second texts, for errors.
        prefix: of the answer's id.
        cut_by: the request's field that lets long texts be cut, for errors.

    Raises:
        ApiError: there are too many texts, or the server refuses one of them.
    """
    first, second = fields
    check_count(second, len(asked), MAX_TEXTS, "texts")
    head = model.head(call, prefix)
    names = {
        "prompt": second,
        "prompt_token_ids": first,
        "text_pair": second,
        "pooling": "model",
        "truncate_prompt": cut_by,
        "max_tokens": "truncate_prompt_tokens",
        "max_first_tokens": "max_tokens_per_query",
        "max_second_tokens": "max_tokens_per_doc",
    }
    prompts: list[tuple[Prompt, Pooling]] = list(asked)
    return head, await vectors(
        gateway, model, call, head.id, prompts, options, names, texts_field=second
    )


def usage_of(completions: Sequence[Completion]) -> EmbeddingUsage:
    """Return the number of tokens of all texts."""
    num_tokens = num_tokens_of(completions)
    return EmbeddingUsage(num_tokens, num_tokens)


async def labels_of(model: ServedModel) -> list[str]:
    """Return the names of the model's scores; [] if it has none, which the server then refuses."""
    scores = (await model.server_info.static()).get("scores") or {}
    return list(scores.get("labels", ()))


# The endpoints.


async def rerank(gateway: Gateway, call: Call, _: EventSink) -> RerankAnswer | list[TeiRankedText]:
    """Rank documents in the format of Cohere and Jina, or texts in that of TEI."""
    fields = convert(await call.parse(), RerankRequest)
    model = gateway.served(fields.model, call.record)
    if (fields.documents is None) == (fields.texts is None):
        raise invalid("give either documents or texts", "documents")
    if fields.top_n is not None and fields.top_n < 1:
        raise invalid(f"top_n is {fields.top_n}: it must be at least 1, or left out", "top_n")
    is_tei = fields.texts is not None
    given = fields.texts or fields.documents or ()
    texts = [each if isinstance(each, str) else each.text for each in given]
    activation = SIGMOID if is_tei else ""
    pooling = Pooling(
        SCORE,
        max_tokens=cut_to(fields.truncate_prompt_tokens),
        activation=activation if fields.use_activation and not fields.raw_scores else IDENTITY,
        max_first_tokens=fields.max_tokens_per_query,
        max_second_tokens=fields.max_tokens_per_doc,
        instruction=fields.instruction or "",
    )
    asked = [(fields.query, replace(pooling, text_pair=text)) for text in texts]
    cuts = bool(fields.truncate) if is_tei else fields.truncate is not False
    names = ("query", "texts" if is_tei else "documents")
    head, completions = await scores_of(
        gateway, model, call, asked, _options(fields, cuts), names, "rerank"
    )
    scores = [vector_of(completion)[0] for completion in completions]
    order = best_first(scores, fields.top_n)
    shown = dict(enumerate(texts)) if fields.return_documents or fields.return_text else {}
    if is_tei:
        return [TeiRankedText(number, scores[number], shown.get(number)) for number in order]
    results = [
        RankedDocument(number, scores[number], {"text": shown[number]} if shown else None)
        for number in order
    ]
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    return RerankAnswer(head.id, model.name, results, usage_of(completions), meta)


def _options(
    fields: RerankRequest | ScoreRequest | ClassifyRequest, cuts: bool | None = None
) -> RequestOptions:
    """Return the options of the requests to the server, which `cuts` long texts; None: its flag."""
    if fields.truncate_prompt_tokens is not None:
        cuts = True
    return {"priority": fields.priority, "truncate_prompt": cuts}


def best_first(scores: Sequence[float], top_n: int | None) -> list[int]:
    """Return the numbers of the highest scores, in descending order; of equal ones, the first."""
    return sorted(range(len(scores)), key=lambda number: -scores[number])[:top_n]


async def score(gateway: Gateway, call: Call, _: EventSink) -> ScoreAnswer:
    """Return the scores of pairs in vLLM's format."""
    fields = convert(await call.parse(), ScoreRequest)
    model = gateway.served(fields.model, call.record)
    pairs, names = _pairs_of(fields)
    pooling = Pooling(
        SCORE,
        max_tokens=cut_to(fields.truncate_prompt_tokens),
        activation="" if fields.use_activation else IDENTITY,
        instruction=fields.instruction or "",
    )
    asked = [(first, replace(pooling, text_pair=second)) for first, second in pairs]
    head, completions = await scores_of(
        gateway, model, call, asked, _options(fields), names, "score", CUT_BY
    )
    data = [
        PairScore(number, vector_of(completion)[0]) for number, completion in enumerate(completions)
    ]
    return ScoreAnswer(head.id, head.created, model.name, data, usage_of(completions))


def _pairs_of(fields: ScoreRequest) -> tuple[list[tuple[str, str]], tuple[str, str]]:
    """Return the pairs of a request, and the names of its two fields. Raise ApiError."""
    names = ("text_1", "text_2") if fields.queries is None else ("queries", "documents")
    first, second = getattr(fields, names[0]), getattr(fields, names[1])
    if first is None or second is None:
        raise invalid("give text_1 and text_2, or queries and documents", names[0])
    firsts = [first] if isinstance(first, str) else first
    seconds = [second] if isinstance(second, str) else second
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise invalid(
            f"{names[0]} has {len(firsts)} texts, and {names[1]} has {len(seconds)}: send one"
            f" first text, or as many as there are in {names[1]}",
            names[0],
        )
    return list(zip(firsts, seconds, strict=True)), names


async def classify(gateway: Gateway, call: Call, _: EventSink) -> ClassifyAnswer:
    """Return the labels of texts in vLLM's format."""
    fields = convert(await call.parse(), ClassifyRequest)
    model = gateway.served(fields.model, call.record)
    pooling = Pooling(
        CLASSIFY,
        max_tokens=cut_to(fields.truncate_prompt_tokens),
        activation=PROBABILITIES if fields.use_activation else IDENTITY,
    )
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    asked = [(text, pooling) for text in texts]
    names, labels = ("input", "input"), await labels_of(model)
    head, completions = await scores_of(
        gateway, model, call, asked, _options(fields), names, "classify", CUT_BY
    )
    data = []
    for number, completion in enumerate(completions):
        scores = vector_of(completion).tolist()
        label = labels[scores.index(max(scores))]
        data.append(TextLabel(number, label, scores, len(scores)))
    return ClassifyAnswer(head.id, head.created, model.name, data, usage_of(completions))


async def predict(
    gateway: Gateway, call: Call, _: EventSink
) -> list[LabelScore] | list[list[LabelScore]]:
    """Return the labels of texts in the format of text-embeddings-inference."""
    return await _predicted(gateway, call, await call.parse())


async def tei_root(gateway: Gateway, call: Call, _: EventSink) -> object:
    """Answer what the clients of the Hugging Face Hub send to the address of a server."""
    body = await call.parse()
    name = body.get("model")
    model = gateway.served(name if isinstance(name, str) else None, call.record)
    info = await model.server_info.static()
    if info.get("scores") and not info.get("embeddings"):
        return await _predicted(gateway, call, body)
    if isinstance(body.get("inputs"), dict):
        return await cosines_of(gateway, call, body)
    return await vectors_of(gateway, call, body)


async def _predicted(
    gateway: Gateway, call: Call, body: dict[str, Any]
) -> list[LabelScore] | list[list[LabelScore]]:
    fields = convert(body, PredictRequest)
    model = gateway.served(fields.model, call.record)
    is_batch = not isinstance(fields.inputs, str) and any(
        isinstance(each, list) for each in fields.inputs
    )
    texts: list[Any] = list(fields.inputs) if is_batch else [fields.inputs]
    parameters = fields.parameters or PredictParameters()
    if parameters.top_k is not None and parameters.top_k < 1:
        raise invalid(f"top_k is {parameters.top_k}: it must be at least 1, or left out", "top_k")
    activation = _FUNCTIONS[parameters.function_to_apply]
    activation = IDENTITY if fields.raw_scores else activation
    asked = []
    for number, text in enumerate(texts):
        first, *second = [text] if isinstance(text, str) else text or [""]
        if (not text and not isinstance(text, str)) or len(second) >= MAX_PAIR_TEXTS:
            raise invalid(
                f"inputs[{number}] is a list of {len(text)} texts: a text alone or a pair is taken;"
                " a list of texts is a list of lists",
                "inputs",
            )
        pair = second[0] if second else None
        asked.append((first, Pooling(CLASSIFY, activation=activation, text_pair=pair)))
    options: RequestOptions = {"truncate_prompt": fields.truncate}
    names, labels = ("inputs", "inputs"), await labels_of(model)
    _head, completions = await scores_of(gateway, model, call, asked, options, names, "predict")
    answers = [
        _labelled(labels, vector_of(completion).tolist())[: parameters.top_k]
        for completion in completions
    ]
    return answers if is_batch else answers[0]


def _labelled(labels: Sequence[str], scores: Sequence[float]) -> list[LabelScore]:
    """Return all labels with their scores, the highest first."""
    return [LabelScore(scores[number], labels[number]) for number in best_first(scores, None)]


_RANKED: Any = RerankAnswer | list[TeiRankedText]
_LABELS: Any = list[LabelScore] | list[list[LabelScore]]

RERANK_ENDPOINTS = [
    *(answering(path, rerank, "Rank documents by their relevance to a query", RerankRequest,
                _RANKED) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(answering(path, score, "Scores of pairs of texts", ScoreRequest, ScoreAnswer)
      for path in ("/score", "/v1/score")),
    answering("/classify", classify, "Labels of texts, with their probabilities", ClassifyRequest,
              ClassifyAnswer),
    answering("/predict", predict, "The same, in the format of text-embeddings-inference",
              PredictRequest, _LABELS),
    answering("/", tei_root, "/embed, /similarity or /predict, by model and body", None, None),
]  # fmt: skip
