"""The endpoints around generating: models, tokens, aborts, the cache, and how the server is."""

from typing import Any

import msgspec
from aiohttp import web

from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, PROBE_AGE, Gateway
from http_proc.protocol.chat_messages import chat_prompt, check_counts, template_options
from http_proc.protocol.errors import ApiError, from_ring, invalid
from http_proc.protocol.schema import Message, Request, Tool
from quadriga.errors import QuadrigaError


class TokenizeRequest(Request):
    """prompt: a text; or messages, as for a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = msgspec.field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class DetokenizeRequest(Request):
    """tokens: token ids."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class AbortBody(Request):
    """rid: the id of an answer, or its X-Request-Id; abort_all: every request of this gateway."""

    rid: str = ""
    abort_all: bool = False


class ModelCard(msgspec.Struct):
    """created: when this gateway started, in Unix seconds; max_model_len: the context in tokens."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "quadriga"


class ModelList(msgspec.Struct):
    """The one model that is served."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(msgspec.Struct):
    """tokens: their ids; max_model_len: the context in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeAnswer(msgspec.Struct):
    """The text: as `prompt` for clients of vLLM, as `text` for those of SGLang."""

    prompt: str
    text: str


class AbortAnswer(msgspec.Struct):
    """aborted: how many requests were found."""

    aborted: int


class FlushAnswer(msgspec.Struct):
    """flushed_pages: pages that are free now."""

    flushed_pages: int


class HealthStatus(msgspec.Struct):
    """status: alive or ready."""

    status: str


def answer(value: Any, status: int = 200) -> web.Response:
    """A JSON answer."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


# --- models and facts -----------------------------------------------------------------------------


async def models(request: web.Request) -> web.Response:
    """The one model that is served."""
    return answer(ModelList([await _model(request.app[GATEWAY])]))


async def model(request: web.Request) -> web.Response:
    """One model by its name, which may have slashes."""
    gateway = request.app[GATEWAY]
    gateway.check_model(request.match_info["name"])
    return answer(await _model(gateway))


async def _model(gateway: Gateway) -> ModelCard:
    facts = await gateway.facts()
    return ModelCard(gateway.model, gateway.started, facts["context_length"])


async def server_info(request: web.Request) -> web.Response:
    """The ring's info, as docs/protocol.md lists it."""
    return answer(await request.app[GATEWAY].info())


# --- tokens ---------------------------------------------------------------------------------------


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a text or a chat, as a request would have them."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    call = convert(body, TokenizeRequest)
    gateway.check_model(call.model)
    if (call.prompt is None) == (call.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    chat = template_options(call.tools, call.chat_template_kwargs)
    prompt: Any = call.prompt if call.messages is None else chat_prompt(call.messages)
    tokens = await gateway.ring.tokenize(prompt, chat)
    facts = await gateway.facts()
    return answer(TokenizeAnswer(len(tokens), facts["context_length"], tokens))


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    gateway = request.app[GATEWAY]
    call = convert(await read_object(request), DetokenizeRequest)
    gateway.check_model(call.model)
    try:
        text = await gateway.ring.detokenize(call.tokens, call.skip_special_tokens)
    except QuadrigaError as error:
        raise from_ring(error, {"prompt": "tokens", "token_ids": "tokens"}) from None
    return answer(DetokenizeAnswer(text, text))


# --- what changes the server's state --------------------------------------------------------------


async def abort_request(request: web.Request) -> web.Response:
    """End requests: they end with finish_reason `abort` and what they had."""
    call = convert(await read_object(request), AbortBody)
    if not call.rid and not call.abort_all:
        raise invalid("give the rid of a request, or abort_all", "rid")
    found = await request.app[GATEWAY].abort(None if call.abort_all else call.rid)
    return answer(AbortAnswer(found))


async def flush_cache(request: web.Request) -> web.Response:
    """Forget cached prefixes that nobody uses now."""
    return answer(FlushAnswer(await request.app[GATEWAY].ring.flush_cache()))


# --- probes ---------------------------------------------------------------------------------------


async def livez(request: web.Request) -> web.Response:
    """This process can answer."""
    return answer(HealthStatus("alive"))


async def readyz(request: web.Request) -> web.Response:
    """The whole ring answers, the model is loaded, and new requests are taken."""
    gateway = request.app[GATEWAY]
    if gateway.draining:
        raise _unready("the server is stopping")
    try:
        info = await gateway.info(PROBE_AGE)
    except QuadrigaError as error:
        raise _unready(str(error)) from None
    if not info["ready"]:
        raise _unready("the model is being loaded")
    return answer(HealthStatus("ready"))


def _unready(why: str) -> ApiError:
    return ApiError(503, why, "server_error", code="not_ready")
