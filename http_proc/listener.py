"""The listening socket: address, TLS, time limits and the limit of connections."""

import asyncio
import errno
import logging
import socket
import ssl
from http import HTTPStatus
from typing import Any, cast

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from http_proc.app import make_app
from http_proc.endpoints.request_body import unsupported_coding
from http_proc.gateway import Gateway
from http_proc.protocol.errors import RETRY_AFTER_S, ApiError, invalid
from quadriga import disk
from quadriga.config.http_args import HttpArgs
from quadriga.errors import AddressInUse, ConfigError
from quadriga.runtime.open_files import allow_open_files

BACKLOG = 1024
# Of a connection, in the kernel. Left to itself it takes megabytes for each client that does not
# read, and the time to copy them.
SEND_BUFFER_BYTES = 128 * 1024
# A connection is closed if no complete request head arrives in this time.
IDLE_TIMEOUT_S = 60
# Time for the last answers to reach slow clients when the server stops.
FLUSH_TIMEOUT_S = 1.0
# A connection over the limit is closed after this time, whether it has sent a request or not.
OVERLOAD_TIMEOUT_S = 5.0
# Open files of this process that are not connections.
NUM_RESERVED_FILES = 64


def bind(args: HttpArgs) -> socket.socket:
    """Return a socket that listens on the configured address.

    Raises:
        AddressInUse: another process has the port.
        ConfigError: the address is invalid.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port {args.port} of {args.host} is taken by another process; stop it, choose"
                " another port with --port, or serve no HTTP with --no-http"
            ) from None
        raise ConfigError(f"cannot listen on {args.host}:{args.port}: {error}") from None
    return listener


def tls_context(args: HttpArgs) -> ssl.SSLContext | None:
    """Return the TLS context of --ssl-certfile and --ssl-keyfile, or None without them.

    Raises:
        ConfigError: a file cannot be read.
    """
    if not args.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        for file in filter(None, (args.ssl_certfile, args.ssl_keyfile)):
            disk.check_regular(file)
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read the certificate {args.ssl_certfile}: {error}") from None
    return context


class GatewayConnection(RequestHandler):
    """A connection that answers in the gateway's form also what no middleware sees.

    That is what aiohttp's parser refuses, and what aiohttp refuses before the application is
    called. The path, and so the API, of such a request is not known: OpenAI's form is taken.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002 - the parser's
    ) -> web.StreamResponse:
        """Answer a request that could not be read."""
        if request.writer.output_size > 0:
            raise ConnectionResetError("a part of the answer has been sent")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            logging.error("a connection failed", exc_info=exc)
            error = ApiError(status, "the gateway failed; its log says why", "server_error")
        else:
            error = refused_by_parser(exc)
        response = response_of(error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: Any, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response; an error of aiohttp's own gets the gateway's form."""
        if isinstance(resp, web.HTTPException) and resp.status >= HTTPStatus.BAD_REQUEST:
            resp = response_of(ApiError(resp.status, resp.reason, code="refused"))
        if "Content-Encoding" in request.headers and not request.content.is_eof():
            # aiohttp would read the rest, and so unpack it, in one piece.
            self._lingering_time = 0.0
        return await super().finish_response(request, resp, start_time)


def refused_by_parser(error: BaseException | None) -> ApiError:
    """Return the 4xx for what aiohttp's parser refuses, without the parser's words."""
    if isinstance(error, http_exceptions.ContentEncodingError):
        return unsupported_coding()
    if isinstance(error, http_exceptions.LineTooLong):
        return ApiError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            "a line of the request's head is too long: at most 8,190 bytes are read",
            code="head_too_large",
        )
    return invalid("the bytes are no HTTP/1.0 or HTTP/1.1 request", code="invalid_http")


def response_of(error: ApiError) -> web.Response:
    """Return the answer to a request that reached no handler."""
    response = web.Response(
        body=error.body(), status=error.status, headers=error.headers(),
        content_type="application/json",
    )  # fmt: skip
    response.headers["Server"] = "quadriga"
    return response


async def make_runner(gateway: Gateway) -> web.AppRunner:
    """Return aiohttp's runner of the gateway's application, without connections."""
    runner = web.AppRunner(
        make_app(gateway),
        handler_cancellation=True,
        handle_signals=False,
        shutdown_timeout=FLUSH_TIMEOUT_S,
    )
    await runner.setup()
    return runner


async def listen(
    runner: web.AppRunner, listener: socket.socket, tls: ssl.SSLContext | None, gateway: Gateway
) -> asyncio.Server:
    """Accept connections. Connections over the limit are answered with 503."""
    max_connections = _max_connections(gateway.args.max_http_connections)
    handlers = runner.server
    assert handlers is not None

    loop = asyncio.get_running_loop()

    def make_protocol() -> asyncio.Protocol:
        if len(handlers.connections) < max_connections:
            return GatewayConnection(
                handlers,
                loop=loop,
                keepalive_timeout=IDLE_TIMEOUT_S,
                access_log=None,  # type: ignore[arg-type]  # none is written, as by web.AppRunner
            )
        gateway.metrics.num_refused_connections += 1
        return OverloadedProtocol(max_connections)

    return await loop.create_server(make_protocol, sock=listener, ssl=tls, backlog=BACKLOG)


class OverloadedProtocol(asyncio.Protocol):
    """Answer any request with 503 because too many connections are open."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time limit of the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's type only looks like one
        asyncio.get_running_loop().call_later(OVERLOAD_TIMEOUT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002
        """Answer the first bytes and discard the rest.

        A client that is disconnected while it sends its request may never see the answer.
        """
        if self._has_answered:
            return
        self._has_answered = True
        error = ApiError(
            503,
            f"{self._max_connections} connections are open, the limit of this server; try again",
            "server_error",
            code="too_many_connections",
            retry_after=RETRY_AFTER_S,
        )
        body = error.body()
        self._transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nServer: quadriga\r\n"
            b"Content-Type: application/json\r\nRetry-After: %d\r\nContent-Length: %d\r\n\r\n"
            % (RETRY_AFTER_S, len(body))
            + body
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


def _max_connections(wanted: int) -> int:
    """Return `wanted`, or what the limit of open files allows if that is less."""
    allowed = max(allow_open_files(wanted + NUM_RESERVED_FILES) - NUM_RESERVED_FILES, 1)
    if allowed < wanted:
        logging.warning(
            "only %d HTTP connections are allowed, not %d (--max-http-connections): the limit of"
            " open files is too low; raise it (ulimit -n)",
            allowed,
            wanted,
        )
    return min(allowed, wanted)
