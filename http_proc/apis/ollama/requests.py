"""Request bodies of Ollama's API. The docstrings are the descriptions in /openapi.json."""

from typing import Annotated, Any, Literal

import msgspec

from http_proc.protocol.schema import RequestBody, Tool, Top
from quadriga.sampling.limits import MAX_SEED

KeepAlive = str | float
Images = list[str]


class OllamaOptions(RequestBody):
    """Sampling parameters.

    num_predict: the largest number of tokens; below 1: what the context leaves. seed: below 0:
    drawn at random. typical_p: 1 only. An absent parameter has the server's default, which is the
    model's own. The fields after typical_p have no effect.
    """

    num_predict: Annotated[int, msgspec.Meta(le=2**31 - 1)] | None = None
    seed: Annotated[int, msgspec.Meta(le=MAX_SEED)] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    typical_p: float | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_gqa: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    embedding_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    rope_frequency_base: float | None = None
    rope_frequency_scale: float | None = None


class OllamaRequest(RequestBody, kw_only=True):
    """Fields of both endpoints.

    format: "json", or a JSON schema that the answer obeys. think: whether the model reasons first,
    or how much. truncate: cut a prompt that is too long to its last tokens. logprobs: return the
    logprob of each token, with top_logprobs top tokens. keep_alive and shift have no effect.
    """

    model: str
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: OllamaOptions = msgspec.field(default_factory=OllamaOptions)
    think: bool | Literal["low", "medium", "high"] | None = None
    truncate: bool | None = None
    logprobs: bool = False
    top_logprobs: Top = 0
    keep_alive: KeepAlive | None = None
    shift: bool | None = None


class OllamaFunction(msgspec.Struct):
    """A function that the model has called. index is ignored."""

    name: str
    arguments: dict[str, Any] = {}
    index: int | None = None


class OllamaToolCall(msgspec.Struct):
    """A call by the model."""

    function: OllamaFunction
    id: str = ""
    type: Literal["function"] = "function"


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn.

    tool_name, tool_call_id: the tool that answers and the id of its call; without them, answers are
    taken in the order of the calls.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat. Without messages the answer says that the model is loaded."""

    messages: list[OllamaMessage] = msgspec.field(default_factory=list)
    tools: list[Tool] = msgspec.field(default_factory=list)


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate.

    prompt: a turn of the user, which the chat template renders, with `system` before it. raw: the
    prompt is sent as it is, as it is to a model without a chat template. suffix: the text after the
    answer, for models that fill in the middle. context: the field `context` of an earlier answer,
    to continue from there; an empty list asks for one. Without a prompt the answer says that the
    model is loaded.
    """

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    raw: bool = False
    context: list[int] | None = None
    images: Images = msgspec.field(default_factory=list)


class OllamaShowRequest(RequestBody, kw_only=True):
    """POST /api/show. name: older name of the field model. verbose has no effect."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None
