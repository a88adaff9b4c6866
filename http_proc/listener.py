"""The listening socket: address, TLS, time limits and the limit of connections."""

import asyncio
import errno
import logging
import socket
import ssl
from typing import cast

from aiohttp import web

from http_proc.app import make_app
from http_proc.gateway import Gateway
from http_proc.protocol.errors import RETRY_AFTER_S, ApiError
from quadriga.config.http_args import HttpArgs
from quadriga.errors import AddressInUse, ConfigError
from quadriga.runtime.open_files import allow_open_files

BACKLOG = 1024
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
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read the certificate {args.ssl_certfile}: {error}") from None
    return context


async def make_runner(gateway: Gateway) -> web.AppRunner:
    """Return aiohttp's runner of the gateway's application, without connections."""
    runner = web.AppRunner(
        make_app(gateway),
        access_log=None,
        handler_cancellation=True,
        handle_signals=False,
        keepalive_timeout=IDLE_TIMEOUT_S,
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

    def make_protocol() -> asyncio.Protocol:
        if len(handlers.connections) < max_connections:
            return handlers()
        gateway.metrics.num_refused_connections += 1
        return OverloadedProtocol(max_connections)

    loop = asyncio.get_running_loop()
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
