"""Bodies of OpenAI's requests and answers, without the sampling fields (sampling.py).

OpenAI's fields without an effect on this server are accepted and ignored; a field that is not
listed is refused by name. The docstrings are the descriptions in /openapi.json. At the end come the
checks of metadata, and the token counts of streams.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from http_proc.answer.events import AnswerEvent, ReasoningTokens
from http_proc.core.errors import invalid
from http_proc.core.observe import TimingsBody, timings_body
from quadriga.client.receipts import Receipt
from quadriga.client.types import Completion, StreamChunk
from quadriga.sampling.params import LIMITS
from quadriga.wire.client import MAX_CACHE_SALT_CHARS, Usage

Top = Annotated[int, msgspec.Meta(ge=LIMITS["logprobs"].minimum, le=LIMITS["logprobs"].maximum)]
Priority = Annotated[
    int, msgspec.Meta(ge=LIMITS["priority"].minimum, le=LIMITS["priority"].maximum)
]

CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all request bodies."""


class StreamOptions(RequestBody, kw_only=True):
    """Where a stream has token counts.

    include_usage: in one last chunk. continuous_usage_stats: in every chunk. include_obfuscation is
    ignored.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class ResponseFormat(msgspec.Struct):
    """The grammar of an answer.

    type: text, json_object, json_schema or structural_tag. json_schema: {"name", "schema"}.
    format, or structures and triggers: the parts of a structural tag.
    """

    type: str
    json_schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(RequestBody, kw_only=True):
    """A grammar in vLLM's format: one of these fields."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None


class AdapterScale(RequestBody, kw_only=True):
    """An adapter in llama.cpp's form. id: its number in GET /lora-adapters. scale: 1, or 0."""

    id: int
    scale: float = 1.0


class OpenAIRequest(RequestBody, kw_only=True):
    """Fields of both endpoints.

    lora, lora_path: the adapter that answers, as llama.cpp and SGLang name it; `model` may name it,
    too. resumable: the stream goes on when its connection breaks, and can be resumed. cache_salt:
    what is cached of the prompt is shared with no request of another salt. prompt_logprobs: number
    of top tokens for each token of the prompt, in vLLM's format. receipt: the answer has receipts,
    unless it is a stream. return_token_ids: the answer has the token ids of the prompt and of each
    choice, in vLLM's fields. prompt_cache_key, prompt_cache_retention, prompt_cache_options: the
    prompt is kept in the prefix cache for a time, and can be released by the key. The other fields
    after structured_outputs have no effect.
    """

    model: str | None = None
    lora: list[AdapterScale] = []
    lora_path: str | None = None
    stream: bool = False
    resumable: bool = False
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    prompt_logprobs: Top | None = None
    response_format: ResponseFormat | None = None
    receipt: bool = False
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_backend: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class CompletionRequest(OpenAIRequest, kw_only=True):
    """POST /v1/completions.

    prompt: a text, token ids, or a list of either. echo: put the prompt before the completion.
    best_of: 1 or n. suffix: the text after the completion, for models that fill in the middle.
    logprobs: number of top tokens for each token, with echo also for those of the prompt.
    """

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None
    logprobs: Top | None = None


class FunctionCall(msgspec.Struct):
    """A function's name and its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct):
    """A call by the model."""

    id: str
    function: FunctionCall
    type: str = "function"


class ContentPart(msgspec.Struct):
    """A part of a message. Only text is supported.

    prompt_cache_breakpoint: the prompt is kept in the prefix cache up to the end of this part,
    where prompt_cache_options has the mode explicit.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a chat.

    function_call: a call in OpenAI's older form. reasoning_content, reasoning: an answer's
    reasoning.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionSchema(msgspec.Struct, omit_defaults=True):
    """A function that the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    """A tool of the request."""

    function: FunctionSchema
    type: Literal["function"] = "function"


class ChatRequest(OpenAIRequest, kw_only=True):
    """POST /v1/chat/completions.

    logprobs: return the logprob of each token. top_logprobs: number of top tokens for each token.
    tool_choice: "none", "auto", "required", a function by name, or allowed_tools. functions,
    function_call: tools in OpenAI's older form. chat_template_kwargs: further variables of the chat
    template. reasoning_effort: "none" turns the reasoning off. include_reasoning: the answer has
    the reasoning. separate_reasoning: it is not in the content. continue_final_message: the answer
    continues the last message, which is the assistant's. add_generation_prompt: the prompt ends
    with the beginning of the answer. The fields after it have no effect.
    """

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    tools: list[Tool] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    functions: list[FunctionSchema] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    logprobs: bool = False
    top_logprobs: Top = 0
    modalities: list[str] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    audio: None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None


class PromptDetails(msgspec.Struct):
    """cached_tokens: number of prompt tokens from the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """reasoning_tokens: number of tokens of the reasoning."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """Token counts. completion_tokens_details: for chats of models that reason."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET

    def with_reasoning(self, num_tokens: list[int | None]) -> "UsageBody":
        """Return the counts with the reasoning of all choices, unless one is not counted."""
        counted = [count for count in num_tokens if count is not None]
        if not counted or len(counted) < len(num_tokens):
            return self
        details = CompletionDetails(sum(counted))
        return msgspec.structs.replace(self, completion_tokens_details=details)


class CompletionChoice(msgspec.Struct):
    """One completion. stop_reason: the stop string or token id that ended it."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionBody(msgspec.Struct):
    """The response of POST /v1/completions."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody
    timings: TimingsBody
    object: str = "text_completion"
    receipts: list[Receipt] | msgspec.UnsetType = msgspec.UNSET


class AnswerMessage(msgspec.Struct):
    """The assistant's turn. content: null if it only calls tools."""

    content: str | None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer. stop_reason: the stop string or token id that ended it."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatBody(msgspec.Struct):
    """The response of POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    timings: TimingsBody
    object: str = "chat.completion"
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    receipts: list[Receipt] | msgspec.UnsetType = msgspec.UNSET


def last_ids(prompt_ids: list[int], num_kept: int) -> list[int]:
    """Return the token ids of a prompt of which only the last ones may have been kept."""
    return prompt_ids[len(prompt_ids) - num_kept :] if num_kept < len(prompt_ids) else prompt_ids


def usage_body(usages: list[Usage], n: int) -> UsageBody:
    """Return the sum over all choices; the prompt of n choices counts once."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    cached = PromptDetails(sum(usage.cached_tokens for usage in usages[::n]))
    return UsageBody(prompt, completion, prompt + completion, cached)


MAX_METADATA_PAIRS, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512


def check_metadata(metadata: Mapping[str, Any] | None) -> None:
    """Raise ApiError for more or longer metadata than OpenAI's API takes."""
    pairs = metadata or {}
    if len(pairs) > MAX_METADATA_PAIRS:
        raise invalid(
            f"metadata has {len(pairs)} pairs: at most {MAX_METADATA_PAIRS} are taken; leave out"
            f" {len(pairs) - MAX_METADATA_PAIRS}",
            "metadata",
        )
    for key, value in pairs.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise invalid(
                f"metadata has the key {key[:100]!r} with {len(key)} characters: at most"
                f" {MAX_METADATA_KEY_CHARS} are taken; shorten it",
                "metadata",
            )
        if isinstance(value, str) and len(value) > MAX_METADATA_CHARS:
            raise invalid(
                f"metadata has {key!r} with {len(value)} characters: at most"
                f" {MAX_METADATA_CHARS} are taken; shorten it",
                "metadata",
            )


USAGE = "@usage@"


class StreamUsage:
    """Count the tokens of a stream that has `n` choices for each prompt.

    Attributes:
        counts_reasoning: the usage has the tokens of the reasoning.
    """

    def __init__(self, options: StreamOptions, n: int, counts_reasoning: bool = False) -> None:
        self._n = n
        self._in_every_chunk = options.continuous_usage_stats
        self._at_the_end = options.include_usage or options.continuous_usage_stats
        self._num_prompt_tokens: list[int] = []
        self._num_tokens: dict[int, int] = {}
        self._final: dict[int, Completion] = {}
        self.counts_reasoning = counts_reasoning and self._at_the_end
        self._reasoning: dict[int, ReasoningTokens] = {}

    @property
    def slot(self) -> dict[str, Any]:
        """The placeholder of the usage in a chunk; empty if the request asks for no usage."""
        return {"usage": USAGE} if self._at_the_end else {}

    def start(self, num_prompt_tokens: list[int]) -> None:
        """Note the length of each prompt."""
        self._num_prompt_tokens = num_prompt_tokens

    def count_reasoning(self, choice: int, events: list[AnswerEvent], chunk: StreamChunk) -> None:
        """Count the tokens of a chunk whose text has these events."""
        self._reasoning.setdefault(choice, ReasoningTokens()).push(events, len(chunk.token_ids))

    def of_chunk(self, choice: int, chunk: StreamChunk) -> bytes:
        """Return the usage in a chunk as JSON: null unless every chunk has one."""
        if chunk.completion is not None:
            self._final[choice] = chunk.completion
        if not self._in_every_chunk:
            return b"null"
        num_tokens = self._num_tokens.get(choice, 0) + len(chunk.token_ids)
        self._num_tokens[choice] = num_tokens
        num_prompt = self._num_prompt_tokens[choice // self._n]
        num_cached = chunk.completion.usage.cached_tokens if chunk.completion else 0
        return msgspec.json.encode(
            UsageBody(num_prompt, num_tokens, num_prompt + num_tokens, PromptDetails(num_cached))
        )

    def total(self) -> dict[str, Any]:
        """Return usage and timings of all choices; empty if the request asks for no usage."""
        if not self._at_the_end:
            return {}
        completions = [self._final[choice] for choice in sorted(self._final)]
        usage = usage_body([completion.usage for completion in completions], self._n)
        counts = [self._reasoning[choice] for choice in sorted(self._reasoning)]
        usage = usage.with_reasoning([each.count if each.is_exact else None for each in counts])
        return {"usage": usage, "timings": timings_body(completions)}

    def at_end_of(self, choice: int) -> dict[str, Any]:
        """Return the timings of a choice for its last chunk, unless a chunk with usage follows."""
        return {} if self._at_the_end else {"timings": timings_body([self._final[choice]])}
