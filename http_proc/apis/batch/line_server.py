"""LineServer: answer lines by the code of the HTTP endpoints, which are served a second time."""

from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Handler

from http_proc.apis.openai.chat import chat_completions
from http_proc.apis.openai.completions import completions
from http_proc.apis.responses.create import create_response
from http_proc.caller import Caller, set_caller
from http_proc.gateway import GATEWAY, Gateway
from http_proc.loopback import LoopbackServer
from http_proc.middleware.request_scope import ERROR_BODIES, UNREAD_ANSWERS, request_scope
from http_proc.middleware.slow_client import UnreadAnswers
from http_proc.middleware.tracing import trace_requests
from quadriga.sampling.limits import LIMITS

ENDPOINTS = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": create_response,
}
# The end of a body; the last of several fields of one name counts.
_PRIORITY = f'"priority":{LIMITS["priority"].minimum}}}'.encode()
CALLER_HEADER, HAS_USERS_HEADER = "X-Caller", "X-Caller-Has-Users"


class LineAnswer(NamedTuple):
    """The answer of an endpoint. retry_after: seconds, 0 without the header; body: JSON."""

    status: int
    body: bytes
    retry_after: float


def with_lowest_priority(body: bytes) -> bytes:
    """Return the JSON of a request with the lowest priority."""
    fields = body.rstrip()[:-1].rstrip()
    return fields + (b"" if fields == b"{" else b",") + _PRIORITY


@web.middleware
async def take_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Let the request of a line be its batch's tenant's."""
    has_users = HAS_USERS_HEADER in request.headers
    set_caller(Caller.of_name(request.headers.get(CALLER_HEADER, ""), has_users))
    return await handler(request)


class LineServer(LoopbackServer):
    """The endpoints for lines of batches."""

    def __init__(self, gateway: Gateway) -> None:
        max_bytes = gateway.args.max_body_bytes + len(_PRIORITY) + 1
        middlewares = [trace_requests, request_scope, take_caller]
        app = web.Application(middlewares=middlewares, client_max_size=max_bytes)
        app[GATEWAY], app[ERROR_BODIES] = gateway, {}
        app[UNREAD_ANSWERS] = UnreadAnswers(gateway.shares)
        app.router.add_routes([web.post(path, handler) for path, handler in ENDPOINTS.items()])
        super().__init__(app, gateway.run_dir, "lines")

    async def answer(
        self, endpoint: str, body: bytes, request_id: str, caller: Caller
    ) -> LineAnswer:
        """Return the answer to the body of a line of this caller.

        Raises:
            aiohttp.ClientError: the server is stopping.
        """
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        headers[CALLER_HEADER] = caller.name
        if caller.has_users:
            headers[HAS_USERS_HEADER] = "1"
        data = with_lowest_priority(body)
        url = f"http://lines{endpoint}"
        async with self.session.post(url, data=data, headers=headers) as response:
            retry_after = float(response.headers.get("Retry-After", 0))
            return LineAnswer(response.status, await response.read(), retry_after)
