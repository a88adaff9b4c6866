"""What surrounds each web request: its id, error bodies, slow clients, its trace and its log line.

Clients that read next to nothing of their answer are disconnected, and so are those that hold too
much.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from http_proc.core.answering import api_error_of, note_failure, observed
from http_proc.core.caller import current_caller
from http_proc.core.errors import ApiError, invalid
from http_proc.core.observe import (
    SERVER_TIMING,
    CallRecord,
    RequestMetrics,
    current_trace,
    server_timing,
    stages,
)
from http_proc.core.shares import Shares, holding
from http_proc.web.exchange import GATEWAY, RECORD, REQUEST_ID, check_head, request_id
from quadriga.errors import QuadrigaError
from quadriga.server.tracing.context import HEADER

# Endpoints that other servers have and this one does not: what the 404 says to do instead.


class NotServed(NamedTuple):
    """Endpoints of one purpose.

    Attributes:
        paths: their paths; one with a slash at its end stands for all below it, too.
        reason: what is not served here, and the remedy.
    """

    paths: tuple[str, ...]
    reason: str


NOT_SERVED = (
    NotServed(
        ("/v1/audio/", "/v1/realtime/"),
        "speech is not served: the models read and write text. Run a server of Whisper or of a"
        " speech model beside this one",
    ),
    NotServed(
        ("/v1/images/", "/v1/videos/"),
        "images and videos are not served: the models read and write text. vLLM and SGLang have"
        " models that see, and diffusion servers draw",
    ),
    NotServed(
        ("/pooling",),
        "hidden states are not served: POST /v1/embeddings returns vectors, POST /score and"
        " POST /classify return scores",
    ),
    NotServed(("/reranking", "/v1/reranking"), "use POST /rerank"),
    NotServed(("/v1/classify",), "use POST /classify"),
    NotServed(
        ("/v1/moderations",),
        "moderation is not served: ask a guard model by POST /v1/chat/completions, or"
        " POST /v1/decisions for the probability of each label",
    ),
    NotServed(
        ("/v1/fine_tuning/", "/v1/evals/"),
        "training and evaluations are not served: train elsewhere, and start the server with"
        " --model DIRECTORY",
    ),
    NotServed(
        ("/v1/assistants/", "/v1/threads/"),
        "assistants are not served: POST /v1/responses keeps conversations and calls tools",
    ),
    NotServed(
        ("/v1/vector_stores/", "/v1/containers/"),
        "stores for searches and containers are not served: make vectors by POST /v1/embeddings,"
        " and run tools in the client",
    ),
    NotServed(
        ("/v1/uploads/",),
        "uploads in parts are not served: POST /v1/files takes 200 MiB at once",
    ),
    NotServed(
        ("/v1/messages/batches/",),
        "batches of messages are not served: POST /v1/batches takes lines for"
        " /v1/chat/completions, /v1/completions and /v1/responses",
    ),
    NotServed(
        ("/api/blobs/",),
        "models are not managed by HTTP: the server serves the one of --model, which its start"
        " fetches; `quadriga models` lists those of the machine",
    ),
    NotServed(
        ("/update_weights_from_disk", "/sleep", "/wake_up", "/release_memory_occupation"),
        "the model is not changed by HTTP: SIGHUP reloads it, and a stop frees its memory",
    ),
    NotServed(
        ("/start_profile", "/stop_profile"),
        "no profile is taken by HTTP: GET /v1/requests/ID/trace shows where a request's time went",
    ),
    NotServed(("/completion", "/completions"), "use POST /v1/completions"),
    NotServed(("/chat/completions",), "use POST /v1/chat/completions"),
    NotServed(("/responses",), "use POST /v1/responses"),
    NotServed(("/embedding", "/embeddings", "/encode"), "use POST /v1/embeddings"),
    NotServed(("/apply-template",), "use POST /render"),
    NotServed(
        ("/slots", "/get_model_info", "/get_server_info", "/model_info", "/version",
         "/load"),
        "use GET /server_info",
    ),
    NotServed(("/health_generate",), "use GET /readyz"),
    NotServed(("/ping",), "use GET /livez"),
    NotServed(("/reset_prefix_cache",), "use POST /flush_cache"),
)  # fmt: skip


def reason_of(path: str) -> str | None:
    """Return what to do in place of a request; None for a path that no known server has."""
    for endpoints in NOT_SERVED:
        for known in endpoints.paths:
            if path.rstrip("/") == known.rstrip("/"):
                return endpoints.reason
            if known.endswith("/") and path.startswith(known):
                return endpoints.reason
    return None


CHECK_INTERVAL_S = 30.0
# A check this late means that the gateway itself was suspended, so the client is not to blame.
MAX_CHECK_DELAY_S = CHECK_INTERVAL_S / 4
MIN_BYTES_PER_INTERVAL = 1024


# Of whole answers that wait for their clients, and the least of which one is counted.
MAX_UNREAD_BYTES = 256 * 1024 * 1024
MIN_COUNTED_BYTES = 64 * 1024
# A client has so much time before it counts as slow, unless all have had less.
MIN_READ_S = 0.5


class SlowClientGuard:
    """Watch the connection of one request while its answer is sent.

    Every CHECK_INTERVAL_S in which data was waiting, the client must read at least
    MIN_BYTES_PER_INTERVAL of it. Data waits in the transport's write buffer: the guard makes
    aiohttp's writes wait until that buffer is empty, so that an answer ends when it was sent.
    """

    def __init__(self, request: web.Request, metrics: RequestMetrics) -> None:
        self._writer = request.writer
        self._transport = request.transport
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._last_waiting = 0
        self._last_sent = 0
        if self._transport is not None:
            # Not 0: an idle TLS transport would block its writer as well.
            self._transport.set_write_buffer_limits(high=1)

    def __enter__(self) -> "SlowClientGuard":
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _schedule(self) -> None:
        self._due_at = self._loop.time() + CHECK_INTERVAL_S
        self._timer = self._loop.call_at(self._due_at, self._check)

    def _check(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        waiting, sent = self.progress()
        is_late = self._loop.time() > self._due_at + MAX_CHECK_DELAY_S
        is_slow = sent - self._last_sent < MIN_BYTES_PER_INTERVAL
        if self._last_waiting and waiting and is_slow and not is_late:
            self.disconnect(
                f"an HTTP client that read less than {MIN_BYTES_PER_INTERVAL} bytes in"
                f" {CHECK_INTERVAL_S:g} s"
            )
            return
        self._last_waiting, self._last_sent = waiting, sent
        self._schedule()

    def progress(self) -> tuple[int, int]:
        """Return the number of bytes that wait for the client, and of bytes sent to it."""
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size()
        return waiting, self._writer.output_size - waiting

    @property
    def num_sent(self) -> int:
        """Number of bytes that were sent."""
        return 0 if self._transport is None else self.progress()[1]

    def disconnect(self, reason: str) -> None:
        """Close the connection of a client that reads too slowly, for a reason that is logged."""
        if self._transport is not None:
            logging.warning("disconnected %s", reason)
            self._metrics.num_slow_readers += 1
            self._transport.abort()


class _Sending(NamedTuple):
    """A whole answer that is being sent. began_at: time of the event loop."""

    owner: str
    size: int
    began_at: float


class UnreadAnswers:
    """Bound the bytes of whole answers that wait until their clients have read them.

    Where they need more, the tenant that has the most for its weight loses the connection whose
    client reads most slowly.

    Args:
        shares: the tenants.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._answers: dict[SlowClientGuard, _Sending] = {}

    @property
    def num_bytes(self) -> int:
        """Size of all answers that wait."""
        return sum(answer.size for answer in self._answers.values())

    @contextmanager
    def sending(self, guard: SlowClientGuard, owner: str, size: int) -> Iterator[None]:
        """Count an answer of an owner in a `with` block, in which it is sent."""
        if size < MIN_COUNTED_BYTES:
            yield
            return
        self._answers[guard] = _Sending(owner, size, asyncio.get_running_loop().time())
        self._make_room()
        try:
            yield
        finally:
            self._answers.pop(guard, None)

    def _make_room(self) -> None:
        while len(self._answers) > 1 and self.num_bytes > MAX_UNREAD_BYTES:
            sizes: Counter[str] = Counter()
            for answer in self._answers.values():
                sizes[self._shares.party(answer.owner)] += answer.size
            slowest = self._slowest_of(self._shares.largest(sizes))
            del self._answers[slowest]
            slowest.disconnect(
                "the slowest reader: answers that wait for HTTP clients have at most"
                f" {MAX_UNREAD_BYTES} bytes"
            )

    def _slowest_of(self, party: str) -> SlowClientGuard:
        now = asyncio.get_running_loop().time()

        def order(guard: SlowClientGuard) -> tuple[bool, float, float]:
            began_at = self._answers[guard].began_at
            age_s = now - began_at
            is_new = age_s < MIN_READ_S
            return is_new, 0.0 if is_new else guard.num_sent / age_s, began_at

        guards = self._answers.items()
        of_party = (guard for guard, one in guards if self._shares.party(one.owner) == party)
        return min(of_party, key=order)


BROKEN_BODY = (
    "the body is not what its headers say: its Content-Encoding, Content-Length or chunks are wrong"
)
UNREAD_ANSWERS = web.AppKey("unread_answers", UnreadAnswers)
# The format of errors by the resource of an endpoint's path.
ERROR_BODIES = web.AppKey(
    "error_bodies", dict[web.AbstractResource | None, Callable[[ApiError], bytes]]
)


@web.middleware
async def request_scope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run a handler and return after the client has received the whole answer."""
    gateway, resource = request.app[GATEWAY], request.match_info.route.resource
    request[REQUEST_ID] = request_id(request)
    record = request[RECORD] = CallRecord(
        request_id=request[REQUEST_ID],
        method=request.method,
        path=request.path,
        route="unknown path" if resource is None else resource.canonical,
    )
    with (
        observed(gateway, record, request.headers.get(HEADER, "")),
        holding(),
        SlowClientGuard(request, gateway.metrics) as guard,
    ):
        response = await _answer(request, handler)
        _add_timing(request, response)
        size = _size_of_body(response)
        with request.app[UNREAD_ANSWERS].sending(guard, current_caller().owner, size):
            await response.prepare(request)
            await response.write_eof()
    return response


def _size_of_body(response: web.StreamResponse) -> int:
    """Return the size of a whole answer; 0 for one that is sent in pieces."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes | bytearray) else 0


def _add_timing(request: web.Request, response: web.StreamResponse) -> None:
    """Add the stages of the first choice to the headers of a whole answer."""
    completions = request[RECORD].completions
    if completions and not response.prepared:
        response.headers[SERVER_TIMING] = server_timing(stages(completions[0].timings))


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the answer, or an error in the API's format."""
    try:
        check_head(request)
        response = await handler(request)
        request[RECORD].answered(response.status)
        return response
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        api_error = _api_error(request, error)
        api_error.request_id = request[REQUEST_ID]
    note_failure(request.app[GATEWAY], request[RECORD], api_error)
    return web.Response(
        body=_error_body(request, api_error),
        status=api_error.status,
        headers=api_error.headers(),
        content_type="application/json",
    )


def _error_body(request: web.Request, error: ApiError) -> bytes:
    """Return the body in the format of the endpoint's API; OpenAI's if there is no endpoint."""
    resource = request.match_info.route.resource
    return request.app[ERROR_BODIES].get(resource, ApiError.body)(error)


def _api_error(request: web.Request, error: Exception) -> ApiError:
    """Convert what a handler raised. An unexpected exception is logged and becomes a 500."""
    if isinstance(error, web.RequestPayloadError | HttpProcessingError):
        return invalid(BROKEN_BODY, code="invalid_body")
    if isinstance(error, web.HTTPException):
        code = error.reason.lower().replace(" ", "_")
        api_error = ApiError(error.status, _message(request, error), code=code)
        api_error.allow = error.headers.get("Allow")
        return api_error
    api_error = api_error_of(error, request[RECORD])
    if request.writer.output_size and not isinstance(error, ApiError | QuadrigaError):
        raise ConnectionResetError("a part of the answer has been sent") from None
    return api_error


def _message(request: web.Request, error: web.HTTPException) -> str:
    if isinstance(error, web.HTTPNotFound):
        reason = reason_of(request.path) or "/openapi.json lists what there is"
        return f"there is no {request.path} here; {reason}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = " or ".join(sorted(error.allowed_methods))
        return f"{request.method} is not for {request.path}: use {allowed}"
    return error.reason


async def add_header(_: web.Request, response: web.StreamResponse) -> None:
    """Add the `traceparent` of a sampled request to its response."""
    if (trace := current_trace()) is not None and trace.context.sampled:
        response.headers[HEADER] = trace.traceparent
