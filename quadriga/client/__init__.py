"""The client library.

    with Client() as client:
        print(client.generate("The capital of France is").text)

A prompt is a string, a list of token ids, or a chat as a list of {"role", "content"} maps. A list
of prompts gives a list of completions in the same order. AsyncClient is the same on an event loop.
"""

from quadriga.client.async_client import AsyncClient, RequestOptions
from quadriga.client.sync_client import Client
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.public import ChatOptions

__all__ = [
    "AsyncClient",
    "ChatOptions",
    "Client",
    "Completion",
    "RequestOptions",
    "SamplingParams",
    "StreamChunk",
    "Timings",
]
