"""The web application: its routes and the order of its middlewares."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from http_proc.apis.batch.service import batch_lifetime
from http_proc.apis.responses.background.service import background_lifetime
from http_proc.apis.responses.stored.service import store_lifetime
from http_proc.endpoints import openapi
from http_proc.endpoints.request_body import expect_continue
from http_proc.gateway import GATEWAY, Gateway
from http_proc.live.endpoint import add_live
from http_proc.middleware import auth, web_pages
from http_proc.middleware.request_scope import ERROR_BODIES, UNREAD_ANSWERS, request_scope
from http_proc.middleware.slow_client import UnreadAnswers
from http_proc.middleware.tracing import add_header, trace_requests
from http_proc.streams.earlier_streams import stream_lifetime
from http_proc.ui.page import serve_page
from http_proc.what_if.endpoint import add_what_if


def make_app(gateway: Gateway) -> web.Application:
    """Return the web application of a gateway."""
    args = gateway.args
    middlewares: list[Middleware] = [trace_requests, request_scope]
    middlewares.append(web_pages.page_check(args, gateway.config.tenants))
    if not args.no_ui:
        middlewares.append(serve_page())
    if auth.needs_key_check(args, gateway.config.tenants):
        middlewares.append(auth.key_check(args, gateway.config.tenants, gateway.tenant_file))
    app = web.Application(middlewares=middlewares, client_max_size=args.max_body_bytes)
    app[GATEWAY] = gateway
    app[UNREAD_ANSWERS] = UnreadAnswers(gateway.shares)
    app[ERROR_BODIES] = {endpoint.handler: endpoint.error_body for endpoint in openapi.ENDPOINTS}
    app.cleanup_ctx.append(store_lifetime)
    app.cleanup_ctx.append(background_lifetime)
    app.cleanup_ctx.append(batch_lifetime)
    app.cleanup_ctx.append(stream_lifetime)
    add_live(app)
    add_what_if(app)
    app.on_response_prepare.append(web_pages.response_hook(args))
    app.on_response_prepare.append(add_header)
    routes = {"get": web.get, "post": web.post, "delete": web.delete}
    for endpoint in openapi.ENDPOINTS:
        route = routes[endpoint.method]
        # A model's name may contain slashes.
        path = endpoint.path.replace("{name}", "{name:.+}")
        app.router.add_routes([route(path, endpoint.handler, expect_handler=expect_continue)])
    return app
