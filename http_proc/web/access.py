"""Who may call the gateway: clients with API keys, operators, and which web pages.

API keys come first, then Host, Origin, CORS, and the policies of the gateway's own pages.
"""

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from http_proc.core.caller import USER_HEADER, Caller, current_caller, set_caller, short_hash
from http_proc.core.errors import POSITION_HEADER, WAIT_HEADER, ApiError
from http_proc.web.exchange import GATEWAY, REQUEST_ID, request_id
from quadriga.server.config.frontend_args import HttpArgs, TenantArgs, is_loopback
from quadriga.server.tenants import TenantFile

# Probes need no key: monitoring should not have to hold one.
PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health"})


def key_check(args: HttpArgs, tenants: TenantArgs, file: TenantFile | None) -> Middleware:
    """Return a middleware that finds the tenant of each request by its API key.

    It answers 401 where keys are needed and the request has none of them. A key of --api-key is no
    tenant's. Without any keys, --tenants-by says who the tenant is. `file`: that of --keys.
    """
    keys = [_as_bytes(key) for key in args.api_keys]
    public_paths = PUBLIC_PATHS | ({"/metrics"} if args.metrics_without_key else set())
    # A thread that does nothing else: no other work delays the end of a removed key.
    reader = ThreadPoolExecutor(1, "keys")

    async def find(request: web.Request) -> Caller | None:
        if file is None and not keys:
            return Caller(request.remote or "")
        given = _given_keys(request)
        if file is not None:
            if file.has_changed():
                await asyncio.get_running_loop().run_in_executor(reader, file.reload)
            for tenant in map(file.index.with_key, given):
                if tenant is not None:
                    return Caller.of_key(tenant)
        address = request.remote if tenants.tenants_by == "address" else None
        return _caller_with_key(given, keys, address or "")

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        caller = Caller()
        if request.path not in public_paths and request.method != "OPTIONS":
            found = await find(request)
            if found is None:
                raise ApiError(
                    401,
                    "no valid API key: send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'",
                    code="invalid_api_key",
                )
            caller = found
            caller.set_user(request.headers.get(USER_HEADER))
        set_caller(caller)
        return await handler(request)

    return check


def needs_key(args: HttpArgs, tenants: TenantArgs) -> bool:
    """Return whether a request without a key is refused."""
    return bool(args.api_keys or tenants.keys)


def needs_key_check(args: HttpArgs, tenants: TenantArgs) -> bool:
    """Return whether requests need keys, or belong to tenants."""
    return bool(args.api_keys) or tenants.has_tenants


def _given_keys(request: web.Request) -> list[bytes]:
    """Return the keys in the headers of OpenAI's and of Anthropic's clients."""
    headers = request.headers
    given = headers.get("Authorization", "")
    scheme, _, key = given.partition(" ")  # the scheme's case does not matter (RFC 9110, 11.1)
    bearer = key.strip() if scheme.lower() == "bearer" else given
    return [_as_bytes(bearer), _as_bytes(headers.get("X-API-Key", ""))]


def _caller_with_key(given: list[bytes], keys: list[bytes], tenant: str) -> Caller | None:
    """Return the caller of a request that has one of the keys; None for any other."""
    # All keys are compared, so that the response time does not depend on them.
    matches = [key for one in given for key in keys if hmac.compare_digest(one, key)]
    if not matches:
        return None
    return Caller(tenant, key_hash=short_hash(matches[0].decode("utf-8", "surrogateescape")))


def _as_bytes(text: str) -> bytes:
    """Encode a text that Python decoded from arbitrary bytes: a header, an argument."""
    return text.encode("utf-8", "surrogateescape")


# Which web pages may call the gateway: Host, Origin, CORS, and the policies of its own pages.
#
# A browser sends requests for every page that it shows, so a page of another site could use a
# server that asks for no key, or read its answers under a name that leads to this machine (DNS
# rebinding). Two checks prevent that. A program that is no browser sends none of the headers that
# they refuse.
#
# 1. Where no key is asked for, a request of a page of another origin is refused, unless
#    --allowed-origins names the origin. `Sec-Fetch-Site` says so where the browser sends it
#    (https://www.w3.org/TR/fetch-metadata/); otherwise `Origin` is compared with `Host`.
# 2. A request to a name that is not this server's is refused: with --allowed-hosts by that list;
#    without it where no key is asked for and the gateway listens on loopback, which has few
#    names.
#    Addresses pass, as a rebound name is never one.

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
        names: lower-case names without ports; one that begins with "." stands for all below it.
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
                    code="unknown_host",
                )
            if not asks_for_key and is_foreign(request, args.origins):
                origin = request.headers.get("Origin", "another site")
                raise ApiError(
                    403,
                    f"a web page of {origin[:MAX_SHOWN_CHARS]} may not use this server, which asks"
                    " for no key: start it with --allowed-origins ORIGIN, or with --api-key",
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


def check_operator(request: web.Request, subject: str) -> None:
    """Raise a 403 for a tenant's key. subject: begins the reason, as "the live feed shows"."""
    if request.app[GATEWAY].config.tenants.keys and current_caller().tenant:
        raise ApiError(
            403,
            f"{subject} all tenants, and this key is one tenant's: use a key of --api-key",
            code="not_allowed",
        )
