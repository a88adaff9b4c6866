"""The table of endpoints."""

from typing import Any

from aiohttp import web

from http_proc import access, chat, completions, metrics, native, openapi, service
from http_proc.gateway import GATEWAY, Gateway


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
    app.on_response_prepare.append(access.header_signer(args))
    app.router.add_routes(
        [
            web.post("/v1/completions", completions.completions),
            web.post("/v1/chat/completions", chat.chat_completions),
            web.get("/v1/models", service.models),
            web.get("/v1/models/{name:.+}", service.model),
            web.post("/generate", native.generate),
            web.post("/tokenize", service.tokenize),
            web.post("/detokenize", service.detokenize),
            web.post("/abort_request", service.abort_request),
            web.post("/flush_cache", service.flush_cache),
            web.get("/livez", service.livez),
            web.get("/readyz", service.readyz),
            web.get("/health", service.readyz),
            web.get("/server_info", service.server_info),
            web.get("/metrics", metrics.metrics),
            web.get("/openapi.json", openapi.openapi),
            web.get("/docs", openapi.docs),
        ]
    )
    return app
