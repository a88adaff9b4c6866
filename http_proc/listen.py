"""The web server's socket and its certificate."""

import errno
import socket
import ssl

from quadriga.errors import AddressInUse, ConfigError
from quadriga.http_args import HttpArgs

BACKLOG = 1024


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
