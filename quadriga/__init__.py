"""Quadriga: an LLM server in four processes, its client, and LLM, which starts one by itself.

    from quadriga import LLM, SamplingParams

    with LLM("smollm2-135m") as llm:
        print(llm.generate("The capital of France is", SamplingParams(max_tokens=16)).text)

    LLM                     a model in this program
    LoRARequest             the adapter that answers a request of an LLM
    Client, AsyncClient     a connection to a server, for threads and for an event loop
    SamplingParams          sampling and stopping of a request
    RequestOptions          keywords of a request: timeout, priority, chat, …
    ChatOptions             tools and variables of the chat template
    CacheHint               what a request asks of the prefix cache
    Completion, Timings     a finished request
    Pooling, TextEmbedding  what vectors of texts are asked for, and one of them
    TextScore, RankedText, TextLabels  what models that rank or classify say of texts
    Question, Decision      a question about a state, and the probabilities of its answers
    StreamChunk             a part of a stream

Every error that the library raises on purpose is a `QuadrigaError`, or a TypeError for a keyword
that does not exist. Names are imported at their first use: `import quadriga` loads nothing else.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga import errors as errors
    from quadriga.client.async_client import AsyncClient as AsyncClient
    from quadriga.client.decisions import Decision as Decision
    from quadriga.client.decisions import Question as Question
    from quadriga.client.sync_client import Client as Client
    from quadriga.client.types import Completion as Completion
    from quadriga.client.types import RankedText as RankedText
    from quadriga.client.types import RequestOptions as RequestOptions
    from quadriga.client.types import StreamChunk as StreamChunk
    from quadriga.client.types import TextEmbedding as TextEmbedding
    from quadriga.client.types import TextLabels as TextLabels
    from quadriga.client.types import TextScore as TextScore
    from quadriga.client.types import Timings as Timings
    from quadriga.errors import AddressInUse as AddressInUse
    from quadriga.errors import ConfigError as ConfigError
    from quadriga.errors import DeadlineExceeded as DeadlineExceeded
    from quadriga.errors import InvalidRequest as InvalidRequest
    from quadriga.errors import ModelError as ModelError
    from quadriga.errors import NonFiniteLogits as NonFiniteLogits
    from quadriga.errors import NonFiniteVector as NonFiniteVector
    from quadriga.errors import PromptTooLong as PromptTooLong
    from quadriga.errors import QuadrigaError as QuadrigaError
    from quadriga.errors import QueueFull as QueueFull
    from quadriga.errors import QuotaExceeded as QuotaExceeded
    from quadriga.errors import RequestAborted as RequestAborted
    from quadriga.errors import RequestFailed as RequestFailed
    from quadriga.errors import ServerFailed as ServerFailed
    from quadriga.errors import ServerStopping as ServerStopping
    from quadriga.errors import ServerUnreachable as ServerUnreachable
    from quadriga.errors import SlowReader as SlowReader
    from quadriga.llm.llm import LLM as LLM
    from quadriga.llm.llm import LoRARequest as LoRARequest
    from quadriga.sampling.params import SamplingParams as SamplingParams
    from quadriga.sampling.pooling import Pooling as Pooling
    from quadriga.wire.cache import CacheHint as CacheHint
    from quadriga.wire.client import ChatOptions as ChatOptions

__version__ = "0.2.0"

# Where each public name is defined; a test compares this table with the imports above.
_MODULES = {
    "quadriga.client.async_client": ("AsyncClient",),
    "quadriga.client.decisions": ("Decision", "Question"),
    "quadriga.client.sync_client": ("Client",),
    "quadriga.client.types": (
        "Completion", "RankedText", "RequestOptions", "StreamChunk", "TextEmbedding", "TextLabels",
        "TextScore", "Timings",
    ),
    "quadriga.errors": (
        "AddressInUse", "ConfigError", "DeadlineExceeded", "InvalidRequest", "ModelError",
        "NonFiniteLogits", "NonFiniteVector", "PromptTooLong", "QuadrigaError", "QueueFull",
        "QuotaExceeded", "RequestAborted", "RequestFailed", "ServerFailed", "ServerStopping",
        "ServerUnreachable", "SlowReader",
    ),
    "quadriga.llm.llm": ("LLM", "LoRARequest"),
    "quadriga.sampling.params": ("SamplingParams",),
    "quadriga.sampling.pooling": ("Pooling",),
    "quadriga.wire.cache": ("CacheHint",),
    "quadriga.wire.client": ("ChatOptions",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


__all__ = [*_MODULE_OF, "__version__", "errors"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use (PEP 562)."""
    from importlib import import_module

    if name == "errors":
        return import_module("quadriga.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'quadriga' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
