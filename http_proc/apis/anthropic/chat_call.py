"""Convert a request of Anthropic's API to the gateway's own terms."""

import re
from typing import NamedTuple

import msgspec

from http_proc.apis.anthropic.conversation import read_conversation
from http_proc.apis.anthropic.errors import NO_THREADS
from http_proc.apis.anthropic.request_types import (
    CountTokensRequest,
    MessagesRequest,
    ThinkingConfig,
    ToolDefinition,
    ToolSelection,
)
from http_proc.chat.call import (
    MAX_TOOL_NAME_CHARS,
    ChatCall,
    ReasoningOptions,
    ToolChoice,
    ToolMode,
)
from http_proc.chat.thinking import BUDGET
from http_proc.protocol.errors import invalid
from http_proc.protocol.response_format import with_grammar
from http_proc.protocol.sampling import Sampling
from http_proc.protocol.schema import FunctionSchema, Tool

TOOL_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}")
TOOL_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
    "none": ToolMode.NONE,
}
# Chat templates know three levels of effort.
EFFORTS = {"xhigh": "high", "max": "high"}


class ThinkingDisplay(NamedTuple):
    """What an answer shows of the reasoning. has_blocks: blocks; has_text: their text."""

    has_blocks: bool
    has_text: bool


def display_of(thinking: ThinkingConfig | None) -> ThinkingDisplay:
    """Return what the answer shows of the reasoning."""
    if thinking is None:
        return ThinkingDisplay(True, True)
    return ThinkingDisplay(thinking.type != "disabled", thinking.display != "omitted")


def chat_call(fields: CountTokensRequest, sampling: Sampling) -> ChatCall:
    """Return the chat of a request. Raise ApiError for a value that cannot be served."""
    _check_supported(fields)
    conversation = read_conversation(fields.messages, fields.system)
    choice = fields.tool_choice or ToolSelection(type="auto")
    return ChatCall(
        messages=conversation.chat,
        sampling=_with_format(sampling, fields),
        tools=[_tool(index, tool) for index, tool in enumerate(fields.tools)],
        tool_choice=_tool_choice(choice),
        is_parallel=not choice.disable_parallel_tool_use,
        reasoning=_reasoning(fields),
        continues_message=conversation.continues_message,
        names={BUDGET: "thinking.budget_tokens"},
        stream=isinstance(fields, MessagesRequest) and fields.stream,
    )


def with_max_tokens(sampling: Sampling, max_tokens: int) -> Sampling:
    """Add the largest number of generated tokens."""
    params = msgspec.structs.replace(sampling.params, max_new_tokens=max_tokens)
    return Sampling(params, {**sampling.names, "max_new_tokens": "max_tokens"})


def _check_supported(fields: CountTokensRequest) -> None:
    """Raise ApiError for fields that would change the answer, and that this server lacks."""
    if fields.mcp_servers:
        raise invalid("mcp_servers: this server calls no MCP servers; leave it out", "mcp_servers")
    if fields.compaction is not None:
        raise invalid("compaction: this server compacts no conversations; leave it out",
                      "compaction")  # fmt: skip
    if fields.thread is not None:
        raise invalid(
            "thread: this server keeps no conversations; leave it out and send all messages",
            "thread",
            NO_THREADS,
        )
    if isinstance(fields.container, dict) and fields.container.get("skills"):
        raise invalid("container.skills: this server has no containers; leave it out", "container")


def _with_format(sampling: Sampling, fields: CountTokensRequest) -> Sampling:
    config, older = fields.output_config, fields.output_format
    if config is not None and config.format is not None:
        if older is not None:
            raise invalid(
                "output_config.format and output_format are the same field; leave one out",
                "output_format",
            )
        grammar = {"json_schema": config.format.schema}
        return with_grammar(sampling, "output_config.format", grammar)
    if older is not None:
        return with_grammar(sampling, "output_format", {"json_schema": older.schema})
    return sampling


def _tool(index: int, tool: ToolDefinition) -> Tool:
    path = f"tools.{index}"
    if tool.type not in (None, "custom"):
        raise invalid(
            f"{path}: {tool.type!r} is a tool of Anthropic's servers; this one takes tools of the"
            " type 'custom', with a name and an input_schema",
            "tools",
        )
    if TOOL_NAME.fullmatch(tool.name) is None:
        raise invalid(
            f"{path}.name is {tool.name!r}: it must have 1 to"
            f" {MAX_TOOL_NAME_CHARS} letters, digits, _ or -",
            "tools",
        )
    if tool.input_schema is None:
        raise invalid(f"{path}.input_schema is missing: give the JSON schema of its input", "tools")
    return Tool(FunctionSchema(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: ToolSelection) -> ToolChoice:
    if choice.type == "tool" and not choice.name:
        raise invalid("tool_choice.name is missing: the type 'tool' needs it", "tool_choice")
    return ToolChoice(TOOL_MODES[choice.type], (choice.name or "") if choice.type == "tool" else "")


def _reasoning(fields: CountTokensRequest) -> ReasoningOptions:
    """Return how much the model reasons; without `thinking` as much as it does by default."""
    config, thinking = fields.output_config, fields.thinking
    effort: str | None = config.effort if config is not None else None
    effort = None if effort is None else EFFORTS.get(effort, effort)
    if thinking is None:
        return ReasoningOptions(effort=effort)
    if thinking.type == "disabled":
        return ReasoningOptions(is_enabled=False, effort=effort)
    if thinking.type == "adaptive":
        return ReasoningOptions(is_enabled=True, effort=effort)
    _check_budget(fields, thinking)
    return ReasoningOptions(is_enabled=True, effort=effort, budget=thinking.budget_tokens)


def _check_budget(fields: CountTokensRequest, thinking: ThinkingConfig) -> None:
    name, budget = "thinking.budget_tokens", thinking.budget_tokens
    if budget is None:
        raise invalid(f"{name} is missing: thinking of the type 'enabled' needs it", "thinking")
    if isinstance(fields, MessagesRequest) and budget >= fields.max_tokens:
        raise invalid(
            f"{name} is {budget}: it must be less than max_tokens, which is {fields.max_tokens}",
            "thinking",
        )
