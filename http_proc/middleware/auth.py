"""API keys: which clients may call the gateway, and for which tenant."""

import asyncio
import hmac
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from http_proc.caller import USER_HEADER, Caller, set_caller, short_hash
from http_proc.protocol.errors import ApiError
from quadriga.config.http_args import HttpArgs
from quadriga.config.tenant_args import TenantArgs
from quadriga.tenants.key_file import TenantFile

# Probes need no key: monitoring should not have to hold one.
PUBLIC_PATHS = frozenset({"/livez", "/readyz", "/health"})


def key_check(args: HttpArgs, tenants: TenantArgs, file: TenantFile | None) -> Middleware:
    """Return a middleware that finds the tenant of each request by its API key.

    It answers 401 where keys are needed and the request has none of them. A key of --api-key is no
    tenant's. Without any keys, --tenants-by says who the tenant is. `file`: that of --keys.
    """
    keys = [_as_bytes(key) for key in args.api_keys]
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
        if request.path not in PUBLIC_PATHS and request.method != "OPTIONS":
            found = await find(request)
            if found is None:
                raise ApiError(
                    401,
                    "no valid API key: send one as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'",
                    "authentication_error",
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
