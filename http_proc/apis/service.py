"""The handlers beside generation: models, tokens, aborts, cache, server info, probes and traces."""

import os
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from operator import attrgetter
from typing import Any

import msgspec
from aiohttp import web

from http_proc.core.call import Call
from http_proc.core.caller import current_caller
from http_proc.core.errors import ApiError, from_server, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.observe import RequestSummary, all_traces
from http_proc.core.served_model import (
    LOADED,
    LOADING,
    LOST,
    READY_MAX_AGE_S,
    ServedAdapter,
    ServedModel,
)
from http_proc.core.streaming import EventSink
from http_proc.generation.chat_call import chat_prompt, check_counts, template_options
from http_proc.generation.sampling import convert
from http_proc.generation.schema import Message, RequestBody, Tool
from http_proc.generation.vectors import classifies, embeds, ranks
from http_proc.web.endpoint import Endpoint, limit_of
from http_proc.web.exchange import GATEWAY, json_response, model_of, read_object
from quadriga import clock
from quadriga.client import AsyncClient
from quadriga.errors import QuadrigaError
from quadriga.server.answer_format import from_info
from quadriga.server.tenants import own_info
from quadriga.server.tracing.chrome import ChromeTrace, chrome_trace

# Anthropic's clients send it with every request.
ANTHROPIC_HEADER = "anthropic-version"
# System One's clients send it with every request.
SYSTEM_ONE_HEADER = "X-TypeSafe-SDK"
# The server's names of a list of token ids.
_ID_FIELDS = ("prompt", "prompt_token_ids", "token_ids")


class TokenizeRequest(RequestBody):
    """POST /tokenize. prompt: a text; or messages, as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class DetokenizeRequest(RequestBody):
    """POST /detokenize. tokens: token ids."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class AbortBody(RequestBody):
    """POST /abort_request.

    rid: the id of an answer, or its X-Request-Id. abort_all: end every request of this gateway.
    """

    rid: str = ""
    abort_all: bool = False


class ModelCapabilities(msgspec.Struct, omit_defaults=True):
    """Whether the model answers chats, whether their tools are used, and whether it reasons.

    embeddings: the server makes vectors of texts. rerank: it scores pairs. classify: it has the
    labels of texts. They are absent otherwise.
    """

    chat: bool
    tools: bool
    reasoning: bool
    embeddings: bool = False
    rerank: bool = False
    classify: bool = False


class ModelCard(msgspec.Struct):
    """A model.

    created: start of the gateway, in Unix seconds. max_model_len: context in tokens. root: the
    model, or the path of an adapter. parent: the model of an adapter. answer_format: where the
    marks of its reasoning and calls come from. aliases: further names of the model in requests, if
    it has any. pinned: of an adapter: it keeps its place in the worker.
    """

    id: str
    created: int
    max_model_len: int
    root: str
    capabilities: ModelCapabilities
    answer_format: str
    parent: str | None = None
    object: str = "model"
    owned_by: str = "quadriga"
    aliases: list[str] | msgspec.UnsetType = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct):
    """The models that are served, the default one first."""

    data: list[ModelCard]
    object: str = "list"


class NamedModel(msgspec.Struct):
    """A model in Anthropic's form. created_at: RFC 3339."""

    id: str
    display_name: str
    created_at: str
    type: str = "model"

    @classmethod
    def of(cls, served: ModelCard) -> "NamedModel":
        """Return a model in this form."""
        created_at = datetime.fromtimestamp(served.created, timezone.utc)
        return cls(served.id, served.id, created_at.strftime("%Y-%m-%dT%H:%M:%SZ"))


class NamedModelList(msgspec.Struct):
    """The models that are served, in Anthropic's form."""

    data: list[NamedModel]
    first_id: str
    last_id: str
    has_more: bool = False


class DescribedModel(msgspec.Struct):
    """A model in System One's form. release_date: YYYY-MM-DD, the day of `created`."""

    name: str
    description: str
    release_date: str

    @classmethod
    def of(cls, served: ModelCard) -> "DescribedModel":
        """Return a model in this form."""
        date = datetime.fromtimestamp(served.created, timezone.utc).strftime("%Y-%m-%d")
        return cls(served.id, f"context of {served.max_model_len} tokens", date)


class DescribedModels(msgspec.Struct):
    """The models that are served, in System One's form."""

    models: list[DescribedModel]


class TokenizeAnswer(msgspec.Struct):
    """Token ids of a text or a chat. max_model_len: context in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct):
    """A text: as `prompt` for clients of vLLM, as `text` for clients of SGLang."""

    prompt: str
    text: str


class AbortAnswer(msgspec.Struct):
    """aborted: number of requests that were open."""

    aborted: int


class FlushAnswer(msgspec.Struct):
    """flushed_pages: number of pages that became free."""

    flushed_pages: int


class ReleaseBody(RequestBody):
    """POST /v1/cache/release. prompt_cache_key: of the requests; left out: all of the tenant."""

    prompt_cache_key: str | None = None


class ReleaseAnswer(msgspec.Struct):
    """released: number of prefixes that are not kept any longer."""

    released: int


class HealthStatus(msgspec.Struct):
    """status: alive or ready."""

    status: str


async def models(request: web.Request) -> web.Response:
    """List the models in the form of the client's API, without those that never answered."""
    gateway = request.app[GATEWAY]
    cards = await gateway.models.known(lambda served: _card(gateway, served))
    answering = {card.id for card in cards}
    for served in gateway.models:
        if served.adapters is not None and served.name in answering:
            for entry in served.adapters.all():
                cards.append(await _card(gateway, ServedAdapter(served, entry.name)))
    if SYSTEM_ONE_HEADER in request.headers:
        return json_response(DescribedModels([DescribedModel.of(card) for card in cards]))
    if ANTHROPIC_HEADER not in request.headers:
        return json_response(ModelList(cards))
    return json_response(
        NamedModelList([NamedModel.of(card) for card in cards], cards[0].id, cards[-1].id)
    )


async def model(request: web.Request) -> web.Response:
    """Return a model by its name, which may contain slashes, in the form of the client's API."""
    gateway, name = request.app[GATEWAY], request.match_info["name"]
    served = gateway.models.find(name)
    if served is None:
        raise gateway.models.missing(name)
    card = await _card(gateway, served)
    is_anthropics = ANTHROPIC_HEADER in request.headers
    return json_response(NamedModel.of(card) if is_anthropics else card)


async def _card(gateway: Gateway, served: ServedModel) -> ModelCard:
    info = await served.server_info.static()
    answers, has_chat = from_info(info["answer_format"]), bool(info["chat"])
    capabilities = ModelCapabilities(
        chat=has_chat,
        tools=has_chat and answers.calls is not None,
        reasoning=has_chat and answers.reasoning is not None,
        embeddings=embeds(info),
        rerank=ranks(info),
        classify=classifies(info),
    )
    card = ModelCard(
        served.name,
        gateway.started_at,
        info["context_length"],
        served.name,
        capabilities,
        answers.source,
        aliases=gateway.models.aliases_of(served) or msgspec.UNSET,
    )
    adapter = served.adapters.find(served.adapter) if served.adapters and served.adapter else None
    if adapter is None:
        return card
    return msgspec.structs.replace(
        card,
        created=int(adapter.loaded_at) or card.created,
        root=adapter.path,
        parent=served.base.name,
        pinned=adapter.pinned,
    )


async def server_info(request: web.Request) -> web.Response:
    """Return the server's info, described in docs/protocol.md, with the pid of this process.

    A tenant's key gets what is served, and the tenant's own usage.
    """
    info = await model_of(request).server_info.current()
    if (entry := current_caller().entry) is not None:
        return json_response(own_info(info, entry.name))
    return json_response(info | {"pids": info["pids"] | {"http_proc": os.getpid()}})


async def tokenize(gateway: Gateway, call: Call, _: EventSink) -> TokenizeAnswer:
    """Return the token ids that a generation request with this text or chat would have."""
    body = await call.parse()
    check_counts(body)
    fields = convert(body, TokenizeRequest)
    model = gateway.served(fields.model, call.record)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    chat = template_options(fields.tools, fields.chat_template_kwargs)
    prompt: Any = fields.prompt if fields.messages is None else chat_prompt(fields.messages)
    tokens = await model.client.tokenize(prompt, chat)
    info = await model.server_info.static()
    return TokenizeAnswer(len(tokens), info["context_length"], tokens)


async def detokenize(gateway: Gateway, call: Call, _: EventSink) -> DetokenizeAnswer:
    """Return the text of token ids."""
    fields = convert(await call.parse(), DetokenizeRequest)
    model = gateway.served(fields.model, call.record)
    try:
        text = await model.client.detokenize(fields.tokens, fields.skip_special_tokens)
    except QuadrigaError as error:
        raise from_server(error, dict.fromkeys(_ID_FIELDS, "tokens")) from None
    return DetokenizeAnswer(text, text)


async def abort_request(request: web.Request) -> web.Response:
    """End requests, which finish with the reason "abort" and their text so far."""
    call = convert(await read_object(request), AbortBody)
    if not call.rid and not call.abort_all:
        raise invalid("give the rid of a request, or abort_all", "rid")
    num_aborted = await request.app[GATEWAY].abort(None if call.abort_all else call.rid)
    return json_response(AbortAnswer(num_aborted))


async def flush_cache(request: web.Request) -> web.Response:
    """Free the cached prefixes that no request uses, of all tenants, of one model or of all."""
    if current_caller().entry is not None:
        raise ApiError(
            403,
            "the cache is that of all tenants: flush it with a key of --api-key",
            code="not_allowed",
        )
    return json_response(FlushAnswer(await _sum(request, lambda client: client.flush_cache())))


async def release_cache(request: web.Request) -> web.Response:
    """Let go what requests of this tenant have asked to keep, of one model or of all."""
    body = convert(await read_object(request), ReleaseBody)
    key, tenant = body.prompt_cache_key, current_caller().tenant
    released = await _sum(request, lambda client: client.release_cache(key, tenant))
    return json_response(ReleaseAnswer(released))


async def _sum(request: web.Request, ask: Callable[[AsyncClient], Awaitable[int]]) -> int:
    """Return the answer of the model that the query names, else the sum of all models' answers.

    Raises:
        QuadrigaError: a model does not answer.
    """
    if "model" in request.query:
        return await ask(model_of(request).client)
    total = 0
    for number in await request.app[GATEWAY].models.each(lambda model: ask(model.client)):
        if isinstance(number, QuadrigaError):
            raise number
        total += number
    return total


async def livez(_: web.Request) -> web.Response:
    """Answer 200: this process runs."""
    return json_response(HealthStatus("alive"))


async def readyz(request: web.Request) -> web.Response:
    """Answer 200 if the server answers, all models are loaded and requests are accepted.

    A model that has ended for good, or is loaded by requests only, does not count.
    """
    gateway = request.app[GATEWAY]
    if gateway.is_draining:
        raise _unready("the server is stopping")
    models = gateway.models
    infos = await models.each(lambda model: model.server_info.current(READY_MAX_AGE_S))
    for model, info in zip(models, infos, strict=True):
        if model.state == LOST:
            continue  # the others are served
        which = f"{model.name}: " if len(models) > 1 else ""
        if isinstance(info, QuadrigaError):
            raise _unready(f"{which}{info}")
        if model.preload and model.state in (LOADED, LOADING) and not info["ready"]:
            raise _unready(f"{which}the model is being loaded")
    return json_response(HealthStatus("ready"))


def _unready(reason: str) -> ApiError:
    return ApiError(503, reason, code="not_ready")


MAX_SHOWN_CHARS = 100


async def request_trace(request: web.Request) -> web.Response:
    """Return the trace of a request that has ended, unless another tenant's."""
    gateway, name = request.app[GATEWAY], request.match_info["id"]
    trace = gateway.traces.find(name, current_caller().tenant)
    if trace is None:
        shown = repr(name[:MAX_SHOWN_CHARS])
        if gateway.open_groups(name) or gateway.traces.is_open(name):
            reason = f"request {shown} has not ended: ask for its trace afterwards"
            raise ApiError(404, reason, code="request_not_ended")
        raise ApiError(
            404,
            f"there is no trace of {shown}: it is unknown, too old, or was not traced; send"
            " requests with a sampled traceparent, or start the server with --keep-traces all or"
            " --trace-sampling-ratio",
            code="trace_not_found",
        )
    traces = await all_traces(trace)
    return json_response(chrome_trace(traces, {"request_id": name}))


DEFAULT_RECENT, MAX_RECENT = 50, 500
MAX_LAST_S = 1e9


class RequestList(msgspec.Struct):
    """Requests that run and requests that have ended, the slowest or the newest first.

    keeps_all: every request is listed; else those with a trace alone, as --keep-traces says.
    has_more: there are others, which `limit` left out.
    """

    data: list[RequestSummary]
    has_more: bool
    keeps_all: bool
    object: str = "list"


async def recent_requests(request: web.Request) -> web.Response:
    """Return the slowest or newest of the requests that run and of the recent ones."""
    gateway = request.app[GATEWAY]
    limit = limit_of(request, DEFAULT_RECENT, MAX_RECENT)
    sort = request.query.get("sort", "slowest")
    if sort not in ("slowest", "newest"):
        raise invalid(f"sort is {sort[:MAX_SHOWN_CHARS]!r}: it must be slowest or newest", "sort")
    since = clock.now() - _last_s(request)
    found = gateway.traces.recent(current_caller().tenant, since)
    key = attrgetter("seconds" if sort == "slowest" else "began_at")
    found.sort(key=key, reverse=True)
    keeps_all = gateway.config.traces.keep_traces == "all"
    return json_response(RequestList(found[:limit], len(found) > limit, keeps_all))


def _last_s(request: web.Request) -> float:
    """Return the seconds until now in which the query wants the requests to have begun."""
    text = request.query.get("last_s", f"{MAX_LAST_S:.0f}")
    if not (text.isascii() and text.isdigit() and 0 < int(text[:20]) <= MAX_LAST_S):
        shown = repr(text[:MAX_SHOWN_CHARS])
        raise invalid(f"last_s is {shown}: it must be from 1 to {MAX_LAST_S:.0f} seconds", "last_s")
    return float(text)


TRACE_ENDPOINTS = [
    Endpoint(
        "/v1/requests",
        recent_requests,
        "Recent requests, the slowest or the newest first",
        RequestList,
    ),
    Endpoint(
        "/v1/requests/{id}/trace",
        request_trace,
        "One request's spans in all processes, as a file for ui.perfetto.dev",
        ChromeTrace,
    ),
]
