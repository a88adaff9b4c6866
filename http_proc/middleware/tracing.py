"""The middleware of traces: `traceparent` in and out, and a span for each traced web request."""

from aiohttp import web
from aiohttp.typedefs import Handler

from http_proc.caller import current_caller
from http_proc.gateway import GATEWAY
from http_proc.observe.request_log import RECORD
from http_proc.observe.request_trace import WebTrace, as_current, current_trace
from quadriga.tracing.context import HEADER
from quadriga.wire.messages.trace import Attributes


@web.middleware
async def trace_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Trace a POST that is sampled, until its client has the answer."""
    if request.method != "POST":
        return await handler(request)
    traces = request.app[GATEWAY].traces
    trace = traces.begin(request.headers.get(HEADER, ""))
    if trace is None:
        return await handler(request)
    with as_current(trace):
        try:
            return await handler(request)
        finally:
            trace.tenant = current_caller().name
            traces.finish(trace, request[RECORD], _attributes(request, trace))


def _attributes(request: web.Request, trace: WebTrace) -> Attributes:
    record, resource = request[RECORD], request.match_info.route.resource
    path = resource.canonical if resource is not None else "unknown path"
    attributes: Attributes = {
        "http.request.method": request.method,
        "http.route": path,
        "quadriga.choices": len(record.completions),
    }
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    if record.code:
        attributes["error.type"] = record.code
    return attributes | ({"quadriga.tenant": trace.tenant} if trace.tenant else {})


async def add_header(_: web.Request, response: web.StreamResponse) -> None:
    """Add the `traceparent` of a traced request to its response."""
    if (trace := current_trace()) is not None:
        response.headers[HEADER] = trace.traceparent
