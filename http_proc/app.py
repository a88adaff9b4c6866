"""The routing table and the order of the middlewares."""

from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware

from http_proc.endpoints import chat, completions, metrics, openapi, service, sglang_generate
from http_proc.endpoints.request_body import expect_continue
from http_proc.gateway import GATEWAY, Gateway
from http_proc.middleware import auth
from http_proc.middleware.request_scope import request_scope


def make_app(gateway: Gateway) -> web.Application:
    """Return the web application of a gateway."""
    args = gateway.args
    middlewares: list[Middleware] = [request_scope]
    if args.origins:
        middlewares.append(auth.answer_preflight)
    if args.api_keys:
        middlewares.append(auth.key_check(args))
    app = web.Application(middlewares=middlewares, client_max_size=args.max_body_bytes)
    app[GATEWAY] = gateway
    get = partial(web.get, expect_handler=expect_continue)
    post = partial(web.post, expect_handler=expect_continue)
    app.on_response_prepare.append(auth.response_hook(args))
    app.router.add_routes(
        [
            post("/v1/completions", completions.completions),
            post("/v1/chat/completions", chat.chat_completions),
            get("/v1/models", service.models),
            get("/v1/models/{name:.+}", service.model),
            post("/generate", sglang_generate.generate),
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
