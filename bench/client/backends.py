"""Interfaces of the bench's clients, and the address of an OpenAI-compatible server."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from quadriga.client.types import Prompt
from quadriga.sampling.params import SamplingParams

OpenAIEndpoint = Literal["completions", "chat"]
DEFAULT_BASE_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class OpenAIServer:
    """An OpenAI-compatible server and the form of the requests to it.

    Attributes:
        base_url: URL without `/v1`.
        model: name of the model; "" takes the first one of `/v1/models`.
        extra_body: fields merged into the body of every request; null removes a field.
    """

    base_url: str = DEFAULT_BASE_URL
    model: str = ""
    endpoint: OpenAIEndpoint = "completions"
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class BenchClient(Protocol):
    """The part of quadriga.client.AsyncClient that sends requests; chunks are its StreamChunks."""

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        truncate_prompt: bool | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        """Send a request and return the iterator over its answer."""


class ServerConnection(BenchClient, Protocol):
    """A client that can also ask for the server's info; `endpoint` is its address."""

    endpoint: str

    async def info(self, timeout: float = 10.0) -> dict[str, Any]:
        """Return the server's info, or raise ServerUnreachable or DeadlineExceeded."""
