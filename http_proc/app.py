"""The table of endpoints."""

from functools import partial
from typing import Any

from aiohttp import web

from http_proc.endpoints import chat, completions, metrics, openapi, service
from http_proc.endpoints import sglang_generate as native
from http_proc.gateway import GATEWAY, Gateway
from http_proc.middleware import access


def make_app(gateway: Gateway) -> web.Application:
    """The web application around a gateway."""
    args = gateway.args
    middlewares: list[Any] = [access.serve]
    if args.origins:
        middlewares.append(access.answer_preflight)
    if args.api_keys:
        middlewares.append(access.key_check(args))
    app = web.Application(middlewares=middlewares, client_max_size=args.max_body_bytes)
    app[GATEWAY] = gateway
    get = partial(web.get, expect_handler=access.expect)
    post = partial(web.post, expect_handler=access.expect)
    app.on_response_prepare.append(access.header_signer(args))
    app.router.add_routes(
        [
            post("/v1/completions", completions.completions),
            post("/v1/chat/completions", chat.chat_completions),
            get("/v1/models", service.models),
            get("/v1/models/{name:.+}", service.model),
            post("/generate", native.generate),
            post("/tokenize", service.tokenize),
            post("/detokenize", service.detokenize),
            post("/abort_request", service.abort_request),
            post("/flush_cache", service.flush_cache),
            get("/livez", service.livez),
            get("/readyz", service.readyz),
            get("/health", service.readyz),
            get("/server_info", service.server_info),
            get("/metrics", metrics.metrics),
            get("/openapi.json", openapi.openapi),
            get("/docs", openapi.docs),
        ]
    )
    return app
