"""The client library. With `quadriga.errors` it is the public interface of the package.

    with Client() as client:
        print(client.generate("The capital of France is").text)

        for chunk in client.stream("Once upon a time", SamplingParams(max_new_tokens=64)):
            print(chunk.text, end="")

A prompt is a string, a list of token ids, or a chat as a list of {"role", "content"} maps. A list
of prompts gives a list of completions in the same order.

    Client, AsyncClient     a connection to a server, for threads and for an event loop
    SamplingParams          sampling and stopping of a request
    RequestOptions          keywords of a request: timeout, priority, chat, …
    ChatOptions             tools and variables of the chat template
    Completion, Timings     a finished request
    StreamChunk             a part of a stream

Every error that the library raises is a subclass of `quadriga.errors.QuadrigaError`.
"""

from quadriga.client.async_client import AsyncClient, RequestOptions
from quadriga.client.sync_client import Client
from quadriga.client.types import Completion, StreamChunk, Timings
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import ChatOptions

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
