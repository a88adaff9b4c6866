"""GET /v1/requests/{id}/trace: one request's whole way, for ui.perfetto.dev."""

from aiohttp import web

from http_proc.caller import current_caller
from http_proc.endpoints.endpoint import Endpoint
from http_proc.gateway import GATEWAY
from http_proc.observe.request_trace import all_traces
from http_proc.protocol.errors import ApiError
from http_proc.responses import json_response
from quadriga.tracing.chrome import ChromeTrace, chrome_trace

MAX_SHOWN_CHARS = 100


async def request_trace(request: web.Request) -> web.Response:
    """Return the trace of a request that has ended, unless another tenant's."""
    gateway, name = request.app[GATEWAY], request.match_info["id"]
    trace = gateway.traces.find(name, current_caller().tenant)
    if trace is None:
        is_open = bool(gateway.open_groups(name)) or gateway.traces.is_open(name)
        raise _not_ended(name) if is_open else _not_found(name)
    traces = await all_traces(trace)
    return json_response(chrome_trace(traces, {"request_id": name}))


def _not_ended(name: str) -> ApiError:
    reason = f"request {name[:MAX_SHOWN_CHARS]!r} has not ended: ask for its trace afterwards"
    return ApiError(404, reason, code="request_not_ended")


def _not_found(name: str) -> ApiError:
    reason = (
        f"there is no trace of {name[:MAX_SHOWN_CHARS]!r}: it is unknown, too old, or was not"
        " traced; send requests with a sampled traceparent, or start the server with"
        " --keep-traces all or --trace-sampling-ratio"
    )
    return ApiError(404, reason, code="trace_not_found")


TRACE_ENDPOINTS = [
    Endpoint(
        "/v1/requests/{id}/trace",
        request_trace,
        "One request's spans in all processes, as a file for ui.perfetto.dev",
        ChromeTrace,
    )
]
