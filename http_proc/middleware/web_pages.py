"""Which web pages may call the gateway: Host, Origin, CORS, and the policies of its own pages.

A browser sends requests for every page that it shows, so a page of another site could use a server
that asks for no key, or read its answers under a name that leads to this machine (DNS rebinding).
Two checks prevent that. A program that is no browser sends none of the headers that they refuse.

1. Where no key is asked for, a request of a page of another origin is refused, unless
   --allowed-origins names the origin. `Sec-Fetch-Site` says so where the browser sends it
   (https://www.w3.org/TR/fetch-metadata/); otherwise `Origin` is compared with `Host`.
2. A request to a name that is not this server's is refused: with --allowed-hosts by that list;
   without it where no key is asked for and the gateway listens on loopback, which has few names.
   Addresses pass, as a rebound name is never one.
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from http_proc.gateway import REQUEST_ID, request_id
from http_proc.middleware.auth import PUBLIC_PATHS, needs_key
from http_proc.protocol.errors import POSITION_HEADER, WAIT_HEADER, ApiError
from quadriga.config.frontend_args import is_loopback
from quadriga.config.http_args import HttpArgs
from quadriga.config.tenant_args import TenantArgs

PREFLIGHT_MAX_AGE_S = "600"
EXPOSED_HEADERS = (
    f"X-Request-Id, Request-Id, X-Stream-Id, Retry-After, {POSITION_HEADER}, {WAIT_HEADER}"
)
# Names that lead to loopback on every machine, and those that no public DNS server can answer
# (RFC 6761; ICANN has reserved .internal): a container reaches its host by one.
LOCAL_NAMES = ("localhost", ".localhost", ".internal")
# What a link opens is shown to the user; the page that has the link cannot read it.
OPENED = ("navigate", "document")
MAX_SHOWN_CHARS = 100
POLICIES = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

ResponseHook = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HostRule:
    """The names under which the gateway may be called.

    Attributes:
        names: Lower-case names without ports; one that begins with "." stands for all below it.
    """

    names: tuple[str, ...]

    @classmethod
    def of(cls, args: HttpArgs, asks_for_key: bool) -> "HostRule | None":
        """Return the rule of a gateway's flags; None: any name is taken."""
        if "*" in args.hosts or not (args.hosts or (is_loopback(args.host) and not asks_for_key)):
            return None
        own = (args.host.lower(), socket.gethostname().lower())
        return cls((*LOCAL_NAMES, *own, *(host.lower().removeprefix("*") for host in args.hosts)))

    def allows(self, host: str) -> bool:
        """Return whether a `Host` header names this server; HTTP/1.0 may have none."""
        name = _name_of(host)
        return not name or _is_address(name) or any(
            name.endswith(known) if known.startswith(".") else name == known for known in self.names
        )  # fmt: skip


def _name_of(host: str) -> str:
    """Return the lower-case name of `NAME:PORT` or `[ADDRESS]:PORT`."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # an unclosed bracket: no name that is allowed
        return host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def page_check(args: HttpArgs, tenants: TenantArgs) -> Middleware:
    """Return a middleware that refuses foreign names and pages, and answers CORS preflights."""
    asks_for_key = needs_key(args, tenants)
    hosts = HostRule.of(args, asks_for_key)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PUBLIC_PATHS:
            host = request.headers.get("Host", "")
            if hosts is not None and not hosts.allows(host):
                raise ApiError(
                    403,
                    f"this server is not known as {host[:MAX_SHOWN_CHARS]!r}: use its address, or"
                    " start it with --allowed-hosts NAME",
                    "permission_error",
                    code="unknown_host",
                )
            if not asks_for_key and is_foreign(request, args.origins):
                origin = request.headers.get("Origin", "another site")
                raise ApiError(
                    403,
                    f"a web page of {origin[:MAX_SHOWN_CHARS]} may not use this server, which asks"
                    " for no key: start it with --allowed-origins ORIGIN, or with --api-key",
                    "permission_error",
                    code="foreign_origin",
                )
        if args.origins and _is_preflight(request):
            return web.Response(status=204)
        return await handler(request)

    return check


def _is_preflight(request: web.Request) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def is_foreign(request: web.Request, origins: list[str]) -> bool:
    """Return whether a page of another origin, which is none of `origins`, sends a request."""
    headers = request.headers
    origin = headers.get("Origin")
    if "*" in origins or origin in origins:
        return False
    site = headers.get("Sec-Fetch-Site")
    if site is None:
        # A proxy may have ended TLS, so the schemes may differ.
        return origin is not None and _host_of(origin) != headers.get("Host", "").lower()
    if site in ("same-origin", "none"):
        return False
    opened = (headers.get("Sec-Fetch-Mode"), headers.get("Sec-Fetch-Dest"))
    return not (request.method in ("GET", "HEAD") and opened == OPENED)


def _host_of(origin: str) -> str:
    """Return `HOST:PORT` of an origin in lower case; "" for `null` and what is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def response_hook(args: HttpArgs) -> ResponseHook:
    """Return a hook that adds the request id, the policies and the CORS headers to responses."""
    origins = args.origins

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "quadriga"
        response.headers["X-Request-Id"] = request.get(REQUEST_ID) or request_id(request)
        # The name by which Anthropic's clients read it.
        response.headers["Request-Id"] = response.headers["X-Request-Id"]
        if request.version < HttpVersion11 and response.content_length is None:
            response.force_close()  # the end of the connection is the end of such an answer
        for name, policy in POLICIES.items():
            response.headers.setdefault(name, policy)
        origin = request.headers.get("Origin")
        if origin is None or not ("*" in origins or origin in origins):
            return
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in origins else origin
        response.headers["Vary"] = "Origin"
        response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE"
            requested = request.headers.get("Access-Control-Request-Headers", "")
            response.headers["Access-Control-Allow-Headers"] = requested
            response.headers["Access-Control-Max-Age"] = PREFLIGHT_MAX_AGE_S

    return add_headers
