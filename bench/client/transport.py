"""Which server is measured, and over what: our own protocol, or OpenAI's over HTTP."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from bench.client.load_generator import BenchClient
from quadriga.client import AsyncClient
from quadriga.errors import ConfigError

OpenAIEndpoint = Literal["completions", "chat"]
DEFAULT_BASE_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """Where the server is, and how it wants to be asked.

    base_url: without /v1. model: "" takes the first one of /v1/models. extra_body: merged into the
    body of every request; null takes a field out.
    """

    base_url: str = DEFAULT_BASE_URL
    model: str = ""
    endpoint: OpenAIEndpoint = "completions"
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class HTTPConnection(BenchClient, Protocol):
    """What sends requests and tells of the server. endpoint: the server's address."""

    endpoint: str

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Of the server. ServerUnreachable or DeadlineExceeded while it cannot answer."""


def connection(
    server: str | OpenAIServer, connect_timeout: float, curve_dir: str = ""
) -> "AbstractAsyncContextManager[HTTPConnection]":
    """To the server: an endpoint of ours, or an OpenAI-compatible one. Seconds to connect in.
    curve_dir: the keys for the former, where it asks for them.

    ConfigError where what it needs is not installed.
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
