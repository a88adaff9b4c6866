"""Connect to the server that is measured: by our own protocol, or by OpenAI's over HTTP."""

from contextlib import AbstractAsyncContextManager

from bench.client.backends import OpenAIServer, ServerConnection
from quadriga.client import AsyncClient
from quadriga.errors import ConfigError


def connection(
    server: str | OpenAIServer, connect_timeout: float, curve_dir: str = ""
) -> AbstractAsyncContextManager[ServerConnection]:
    """Return a connection that opens on entering; `server` may be an endpoint of Quadriga.

    Raises ConfigError if a package that the connection needs is not installed.
    """
    if isinstance(server, str):
        return AsyncClient(server, connect_timeout, curve_dir=curve_dir)
    try:
        from bench.client.openai_client import OpenAIClient
    except ImportError as error:
        raise ConfigError(
            f"--backend openai needs {error.name}, which is not installed:"
            " pip install 'quadriga[bench]'"
        ) from None
    return OpenAIClient(server, connect_timeout)
