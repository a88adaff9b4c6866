"""The web server's socket, its certificate, and how many connections it has."""

import asyncio
import errno
import logging
import socket
import ssl
from typing import cast

from aiohttp import web

from http_proc.app import make_app
from http_proc.gateway import Gateway
from http_proc.protocol.errors import RETRY_AFTER, ApiError
from quadriga.config.http_args import HttpArgs
from quadriga.errors import AddressInUse, ConfigError
from quadriga.runtime.open_files import allow_open_files

BACKLOG = 1024
IDLE_SECONDS = 60
"""A connection on which no whole head of a request has come for so long is closed."""
FLUSH_TIMEOUT_S = 1.0
"""Seconds that the last answers may take once the ring has nothing more to say."""
PATIENCE = 5.0
"""Seconds until a connection over the limit is closed, whether it has asked something or not."""
FILES_BESIDE = 64
"""Open files that are no connections."""


def bind(args: HttpArgs) -> socket.socket:
    """A bound socket. AddressInUse, or ConfigError for an address that cannot be."""
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
    """The context of --ssl-certfile and --ssl-keyfile; None without them. ConfigError where they
    cannot be read."""
    if not args.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot read the certificate {args.ssl_certfile}: {error}") from None
    return context


async def make_runner(gateway: Gateway) -> web.AppRunner:
    """What serves the gateway's application; it has no connections yet."""
    runner = web.AppRunner(
        make_app(gateway),
        access_log=None,
        handler_cancellation=True,
        handle_signals=False,
        keepalive_timeout=IDLE_SECONDS,
        shutdown_timeout=FLUSH_TIMEOUT_S,
    )
    await runner.setup()
    return runner


async def listen(
    runner: web.AppRunner, listener: socket.socket, tls: ssl.SSLContext | None, gateway: Gateway
) -> asyncio.Server:
    """Take connections, of which those over the limit are told so."""
    most, handlers = _most_connections(gateway.args.max_http_connections), runner.server
    assert handlers is not None

    def make_protocol() -> asyncio.Protocol:
        if len(handlers.connections) < most:
            return handlers()
        gateway.metrics.refused_connections += 1
        return OverloadedProtocol(most)

    loop = asyncio.get_running_loop()
    return await loop.create_server(make_protocol, sock=listener, ssl=tls, backlog=BACKLOG)


class OverloadedProtocol(asyncio.Protocol):
    """Answers whatever is asked that there are too many connections."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._has_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        asyncio.get_running_loop().call_later(PATIENCE, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Answer the first bytes. The rest of the request is read to no purpose: a client that is
        cut off while it sends may never see the answer."""
        if self._has_answered:
            return
        self._has_answered = True
        error = ApiError(
            503,
            f"{self._most} connections are open, the most that may",
            "server_error",
            code="too_many_connections",
            retry_after=RETRY_AFTER,
        )
        body = error.body()
        self._transport.write(
            b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nServer: quadriga\r\n"
            b"Content-Type: application/json\r\nRetry-After: %d\r\nContent-Length: %d\r\n\r\n"
            % (RETRY_AFTER, len(body))
            + body
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()


def _most_connections(wanted: int) -> int:
    """Return how many connections there can be: the system may allow fewer open files."""
    possible = max(allow_open_files(wanted + FILES_BESIDE) - FILES_BESIDE, 1)
    if possible < wanted:
        logging.warning(
            "only %d HTTP connections are taken, not %d (--max-http-connections): the limit of open"
            " files is too low (ulimit -n)",
            possible,
            wanted,
        )
    return min(possible, wanted)
