"""Endpoints that show what is of all tenants: for the key of an operator only."""

from aiohttp import web

from http_proc.caller import current_caller
from http_proc.gateway import GATEWAY
from http_proc.protocol.errors import ApiError


def check_operator(request: web.Request, subject: str) -> None:
    """Raise a 403 for a tenant's key. subject: begins the reason, as "the live feed shows"."""
    if request.app[GATEWAY].config.tenants.keys and current_caller().tenant:
        raise ApiError(
            403,
            f"{subject} all tenants, and this key is one tenant's: use a key of --api-key",
            "permission_error",
            code="not_allowed",
        )
