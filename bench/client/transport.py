"""Connect to the server that is measured: by our own protocol, or by OpenAI's over HTTP."""

from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

from bench.client.backends import OpenAIServer, ServerConnection
from bench.client.server import OwnServer
from quadriga.client import AsyncClient
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError
from quadriga.programs import install_command

# These two hold for each attempt while the bench's own server starts.
START_CONNECT_TIMEOUT_S = 1.0
START_INFO_TIMEOUT_S = 2.0


def connection(
    server: str | OpenAIServer, connect_timeout: float, curve_dir: str
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
            f" {install_command('bench')}"
        ) from None
    return OpenAIClient(server, connect_timeout)


async def info_of(
    server: str | OpenAIServer, curve_dir: str, connect_timeout: float, info_timeout: float
) -> dict[str, Any]:
    """Return a server's info, or raise ServerUnreachable or DeadlineExceeded."""
    async with connection(server, connect_timeout, curve_dir) as client:
        return await client.info(info_timeout)


async def start_server(
    config: ServerConfig, log: Path | None, stack: AsyncExitStack
) -> tuple[str, dict[str, Any]]:
    """Start a server, which the stack stops; return its endpoint and info once it serves."""
    server = stack.enter_context(OwnServer(config, log))
    keys = config.frontend.curve_dir
    info = await server.wait_ready(
        lambda: info_of(server.endpoint, keys, START_CONNECT_TIMEOUT_S, START_INFO_TIMEOUT_S)
    )
    return server.endpoint, info
