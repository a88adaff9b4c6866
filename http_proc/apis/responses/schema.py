"""Bodies of POST /v1/responses: the request, and the response object."""

from typing import Annotated, Any, Literal

import msgspec

from http_proc.core.errors import invalid
from http_proc.core.observe import TimingsBody
from http_proc.generation.sampling import OPENAI
from http_proc.generation.schema import Priority, ReasoningEffort, RequestBody, Top

# The request's names of sampling fields; a response has one answer.
RESPONSES = {name: field for name, field in OPENAI.items() if name not in ("n", "max_tokens")}
RESPONSES["max_output_tokens"] = "max_new_tokens"

Verbosity = Literal["low", "medium", "high"]
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ReasoningRequest(RequestBody, kw_only=True):
    """How much the model reasons.

    effort: value of the template's variable reasoning_effort; none: the model does not reason. The
    other fields have no effect.
    """

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: str | None = None
    mode: str | None = None


class TextFormat(RequestBody, kw_only=True):
    """The grammar of the text. schema: a JSON schema, which `type: json_schema` needs."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextRequest(RequestBody, kw_only=True):
    """How the text is written. verbosity has no effect."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ObfuscationOption(RequestBody, kw_only=True):
    """Options of a stream, without an effect."""

    include_obfuscation: bool = False


class ResponsesRequest(RequestBody, kw_only=True):
    """POST /v1/responses.

    input: a text, or items: messages, function_call, function_call_output, custom_tool_call,
    custom_tool_call_output, reasoning. tools: of the types function and custom. include:
    message.output_text.logprobs returns the logprob of each token of the text. resumable: the
    stream goes on when its connection breaks, and can be resumed. truncation: auto keeps the last
    tokens of a prompt that is longer than the context. store: the response is kept, where the
    server keeps responses. background: the response is made also without a client, which reads it
    later. previous_response_id, or conversation (an id, or {"id"}): what is continued. prompt is
    refused. The fields after priority have no effect.
    """

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningRequest = msgspec.field(default_factory=ReasoningRequest)
    text: TextRequest = msgspec.field(default_factory=TextRequest)
    include: list[Includable] = msgspec.field(default_factory=list)
    top_logprobs: Top = 0
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool = False
    resumable: bool = False
    store: bool = True
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    priority: Priority = 0
    stream_options: ObfuscationOption | None = None
    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: str | None = None
    client_metadata: dict[str, Any] | None = None


def conversation_id(conversation: str | dict[str, Any]) -> str:
    """Return the id of the conversation that a request names. Raise ApiError."""
    named = conversation.get("id") if isinstance(conversation, dict) else conversation
    if not isinstance(named, str) or not named:
        raise invalid('conversation must be an id, or {"id": …}', "conversation")
    return named


class ConversationName(msgspec.Struct):
    """The conversation of a response."""

    id: str


class InputTokensDetails(msgspec.Struct):
    """cached_tokens: number of input tokens from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """reasoning_tokens: number of output tokens that were reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """What ended a response. code: a short name."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: its state, its output items, and the fields of its request.

    status: queued, in_progress, completed, incomplete, cancelled or failed. output:
    items of the types reasoning, message, function_call and custom_tool_call. store: the response
    is kept.
    """

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    conversation: ConversationName | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[dict[str, Any]] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str] = {}
    timings: TimingsBody | None = None
