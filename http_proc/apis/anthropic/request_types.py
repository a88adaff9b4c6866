"""Request bodies of Anthropic's API, without the sampling fields.

The docstrings are the descriptions in /openapi.json. Fields without an effect on this server are
accepted and ignored; a field that is not listed is refused by name.
"""

from typing import Annotated, Any, Literal

import msgspec

from http_proc.protocol.schema import RequestBody

# The request's name of a sampling field -> SamplingParams' name.
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}


class ContentBlock(msgspec.Struct, kw_only=True):
    """A part of a message: text, thinking, redacted_thinking, tool_use or tool_result.

    id, name, input: of a tool_use. tool_use_id, content, is_error: of a tool_result. Other fields,
    such as cache_control, are ignored.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: "str | list[ContentBlock] | None" = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct):
    """A message of a conversation; consecutive messages of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool that the client runs. input_schema: JSON schema of its input."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolSelection(msgspec.Struct, kw_only=True):
    """Whether tools are called. name: of the tool, for the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Whether the model reasons.

    budget_tokens: number of tokens after which the reasoning is closed. display: omitted leaves
    the text of thinking blocks empty.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A JSON schema that the text of the answer obeys."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """How much effort is put into the answer, and its format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(RequestBody, kw_only=True):
    """POST /v1/messages/count_tokens.

    output_format: the older name of output_config.format. The fields after it have no effect;
    mcp_servers, compaction, thread and the skills of a container must be empty.
    """

    model: str | None = None
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[ContentBlock] = ""
    tools: list[ToolDefinition] = msgspec.field(default_factory=list)
    tool_choice: ToolSelection | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    mcp_servers: list[Any] = msgspec.field(default_factory=list)
    compaction: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    container: str | dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    billing_policy: Any = None
    fallbacks: Any = None
    fallback_credit_token: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    betas: list[str] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages.

    max_tokens: largest number of generated tokens, or what the context leaves if that is less; 0
    computes the prompt alone, for the prefix cache. stop_sequences: strings that end the text. The
    fields after output_format have no effect; mcp_servers, compaction, thread and the skills of
    a container must be empty.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    stream: bool = False
