"""Anthropic's API: POST /v1/messages and POST /v1/messages/count_tokens.

First the bodies of requests, how they become a chat of the gateway, and errors; then the content
blocks of an answer, its body and its stream; then the handlers. The docstrings of bodies are the
descriptions in /openapi.json.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from http_proc.answer.events import (
    AnswerEvent,
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from http_proc.core.call import Call
from http_proc.core.caller import current_caller
from http_proc.core.errors import CONTEXT_EXCEEDED, ApiError, QueueHint, from_server, invalid
from http_proc.core.gateway import Gateway
from http_proc.core.observe import TimingsBody, timings_body
from http_proc.core.served_model import ResponseHead, ServedModel
from http_proc.core.streaming import EventSink, named_event
from http_proc.generation.cache_hints import CacheControl, PromptMark, marked_hint
from http_proc.generation.chat_answers import (
    ChatAnswer,
    ChatRenderer,
    collect_chat,
    stream_chat,
)
from http_proc.generation.chat_call import (
    MAX_CONTENT_PARTS,
    MAX_TOOL_NAME_CHARS,
    ChatCall,
    ReasoningOptions,
    ToolChoice,
    ToolMode,
    check_counts,
)
from http_proc.generation.prepare import prepare_chat
from http_proc.generation.sampling import BUDGET, Sampling, convert, take_sampling, with_grammar
from http_proc.generation.schema import FunctionSchema, RequestBody, Tool
from http_proc.web.endpoint import answering, generating
from quadriga.client.async_client import RequestOptions
from quadriga.client.types import Chat, Completion, StreamChunk
from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.wire.client import ChatMessage, Usage, check_chat

# The docstrings are the descriptions in /openapi.json. Fields without an effect on this server
# are accepted and ignored; a field that is not listed is refused by name.

# The request's name of a sampling field -> SamplingParams' name.
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
    "first_token_ids": "first_token_ids",
}


class ContentBlock(msgspec.Struct, kw_only=True):
    """A part of a message: text, thinking, redacted_thinking, tool_use or tool_result.

    id, name, input: of a tool_use. tool_use_id, content, is_error: of a tool_result. cache_control:
    the prompt is kept in the prefix cache. Other fields are ignored.
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
    cache_control: CacheControl | None = None


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
    cache_control: CacheControl | None = None


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

    output_format: the older name of output_config.format. cache_control: the prompt is kept in the
    prefix cache. The other fields after output_format have no effect; mcp_servers, compaction,
    thread and the skills of a container must be empty.
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
    cache_control: CacheControl | None = None
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
    computes the prompt alone, for the prefix cache. stop_sequences: strings that end the text.
    cache_control: the prompt is kept in the prefix cache. The other fields after output_format have
    no effect; mcp_servers, compaction, thread and the skills of a container must be empty.
    """

    max_tokens: Annotated[int, msgspec.Meta(ge=0)]
    stream: bool = False


# Claude Code puts it before its system prompt, with a value that differs in each request, so that
# no request would have a cached prefix.
BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")

BLOCK_TYPES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class PlacedBlock(NamedTuple):
    """A block, and its place in the request, such as messages.0.content.1."""

    path: str
    block: ContentBlock


@dataclass(slots=True)
class MergedTurn:
    """Consecutive messages of one role. path: place of the first one in the request."""

    role: str
    path: str
    blocks: list[PlacedBlock] = field(default_factory=list)

    def of_type(self, kind: str) -> list[PlacedBlock]:
        """Return the blocks of a type."""
        return [placed for placed in self.blocks if placed.block.type == kind]

    def text(self, separator: str) -> str:
        """Return the text of all text blocks."""
        texts = (placed.block.text for placed in self.of_type("text"))
        return separator.join(text for text in texts if text)


class ConvertedChat(NamedTuple):
    """A chat in the server's form.

    Attributes:
        continues_message: the answer continues the last turn.
        marked: the last place with cache_control in the messages; None: there is none.
    """

    chat: Chat
    continues_message: bool
    marked: PromptMark | None


def read_conversation(
    messages: list[InputMessage], system: str | list[ContentBlock]
) -> ConvertedChat:
    """Return the turns of a request.

    A turn of the user with results of tools becomes one turn of a tool for each result, and then
    one of the user with the text.

    Raises:
        ApiError: a block that is not taken, a tool_result that answers no tool_use, a tool_use
            without its result, or more turns or blocks than are allowed.
    """
    turns = _merged(messages)
    _check_num_blocks(turns)
    converter = _Converter()
    if text := _system_text(system):
        converter.add_system(text)
    for turn in turns:
        match turn.role:
            case "user":
                converter.add_user(turn)
            case "assistant":
                converter.add_assistant(turn)
            case "system":
                converter.add_system(turn.text("\n"))
    converter.check_is_answered()
    _check_limits(converter.chat)
    continues = _continues(turns[-1], converter.chat)
    return ConvertedChat(converter.chat, continues, converter.marked)


def _merged(messages: list[InputMessage]) -> list[MergedTurn]:
    turns: list[MergedTurn] = []
    for index, message in enumerate(messages):
        path = f"messages.{index}"
        if not turns or turns[-1].role != message.role:
            turns.append(MergedTurn(message.role, path))
        turns[-1].blocks += _blocks(message.role, f"{path}.content", message.content)
    return turns


def _blocks(role: str, path: str, content: str | list[ContentBlock]) -> Iterator[PlacedBlock]:
    """Yield the blocks of a message. Raise ApiError for a type that the role does not have."""
    if isinstance(content, str):
        yield PlacedBlock(path, ContentBlock(type="text", text=content))
        return
    for index, block in enumerate(content):
        place = f"{path}.{index}"
        if block.type not in BLOCK_TYPES[role]:
            raise _not_taken(place, block.type, BLOCK_TYPES[role])
        yield PlacedBlock(place, block)


def _not_taken(path: str, kind: str, taken: tuple[str, ...]) -> ApiError:
    if kind in ("image", "document"):
        return _wrong(path, f"a block of type {kind!r}: this server reads only text; send its text")
    return _wrong(path, f"a block of type {kind!r}: it must be one of {', '.join(taken)} here")


def _wrong(path: str, message: str) -> ApiError:
    return invalid(f"{path}: {message}", path.partition(".")[0])


def _check_num_blocks(turns: list[MergedTurn]) -> None:
    num_blocks = sum(len(turn.blocks) for turn in turns)
    if num_blocks > MAX_CONTENT_PARTS:
        raise invalid(
            f"the messages have {num_blocks} content blocks: at most {MAX_CONTENT_PARTS} are"
            " allowed; join some",
            "messages",
        )


def _check_limits(chat: Chat) -> None:
    try:
        check_chat(msgspec.convert(chat, list[ChatMessage]))
    except InvalidRequest as error:
        raise from_server(error, {"prompt": "messages"}) from None


def _continues(last: MergedTurn, chat: Chat) -> bool:
    """Return whether the answer continues the last turn, which is then the assistant's."""
    if last.role != "assistant" or chat[-1]["role"] != "assistant":
        return False
    if not chat[-1]["content"]:
        raise _wrong(last.path, "the assistant's last message is continued: give it text")
    return True


def _system_text(system: str | list[ContentBlock]) -> str:
    texts = [placed.block.text or "" for placed in _blocks("system", "system", system)]
    if texts and (header := BILLING_HEADER.match(texts[0])):
        texts[0] = texts[0][header.end() :]
    return "\n".join(text for text in texts if text)


def _result_text(path: str, block: ContentBlock) -> str:
    content, text = block.content, ""
    if isinstance(content, str):
        text = content
    elif content is not None:
        for index, part in enumerate(content):
            if part.type != "text":
                raise _not_taken(f"{path}.content.{index}", part.type, ("text",))
        text = "\n".join(part.text for part in content if part.text)
    # No chat template has a mark for a failure.
    return f"Error: {text}" if block.is_error else text


class _Converter:
    """Collect the server's turns, and check that calls and their results belong together."""

    def __init__(self) -> None:
        self.chat: list[dict[str, Any]] = []
        self.marked: PromptMark | None = None
        self._open_calls: dict[str, str] = {}  # id -> name of the tool
        self._calls_path = ""

    def add_system(self, text: str) -> None:
        """Append a system prompt; one that follows another is added to it."""
        if self.chat and self.chat[-1]["role"] == "system":
            self.chat[-1]["content"] += f"\n{text}"
        else:
            self.chat.append({"role": "system", "content": text})

    def add_user(self, turn: MergedTurn) -> None:
        """Append the results of tools, and the text."""
        results = turn.of_type("tool_result")
        for placed in results:
            self._add_result(placed)
        self.check_is_answered()
        text = turn.text("\n")
        if text or not results:
            self.chat.append({"role": "user", "content": text})
            self._mark(turn, "\n")

    def add_assistant(self, turn: MergedTurn) -> None:
        """Append text, reasoning and calls as one turn; a turn without any of them is left out."""
        self.check_is_answered()
        message: dict[str, Any] = {"role": "assistant", "content": turn.text("")}
        thinking = turn.of_type("thinking")
        if reasoning := "".join(placed.block.thinking or "" for placed in thinking):
            message["reasoning_content"] = reasoning
        self._calls_path = turn.path
        if calls := [self._call(placed) for placed in turn.of_type("tool_use")]:
            message["tool_calls"] = calls
        if message["content"] or len(message) > 2:
            self.chat.append(message)
            self._mark(turn, "")

    def check_is_answered(self) -> None:
        """Raise ApiError if a call of the assistant's last turn has no result."""
        if self._open_calls:
            names = ", ".join(map(repr, self._open_calls))
            raise _wrong(
                self._calls_path,
                f"tool_use without tool_result: {names}; the next message must have a tool_result"
                " for each tool_use",
            )

    def _add_result(self, placed: PlacedBlock) -> None:
        path, block = placed
        name = self._open_calls.pop(block.tool_use_id or "", None)
        if name is None:
            raise _wrong(
                f"{path}.tool_use_id",
                f"{block.tool_use_id!r} answers no tool_use of the message before it, or one that"
                " has its result already",
            )
        turn = {"role": "tool", "content": _result_text(path, block), "name": name}
        self.chat.append(turn | {"tool_call_id": block.tool_use_id})
        if any(_marks_in([block])):
            self.marked = PromptMark(len(self.chat))

    def _mark(self, turn: MergedTurn, separator: str) -> None:
        """Note the last mark of the turn that was appended: within its text, or at its end."""
        texts = list[str]()
        for placed in turn.blocks:
            block = placed.block
            if block.type == "text" and block.text:
                texts.append(block.text)
            if block.cache_control is not None and block.type != "tool_result":
                is_text = block.type == "text"
                num_chars = len(separator.join(texts)) if is_text else None
                self.marked = PromptMark(len(self.chat), num_chars)

    def _call(self, placed: PlacedBlock) -> dict[str, Any]:
        path, block = placed
        if not block.id or not block.name or block.input is None:
            raise _wrong(path, "a tool_use must have an id, a name and an input")
        if block.id in self._open_calls:
            raise _wrong(f"{path}.id", f"{block.id!r} is the id of another tool_use; rename it")
        self._open_calls[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        return {"id": block.id, "type": "function", "function": function}


# The SDK retries 408, 409, 429 and everything from 500 on, so that the statuses stay as they are.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# The SDK sends the whole conversation after this error.
NO_THREADS = "thread_unsupported_request"
_LENGTHS = re.compile(r"(\d+) tokens.*?(?:context is|pool holds) (\d+)")


class ErrorDetail(QueueHint):
    """What went wrong. details: {"error_code"} of an error from which the SDK recovers by it."""

    type: str
    message: str
    details: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class MessageErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer with an error status, and of the event error of a stream."""

    type: Literal["error"] = "error"
    error: ErrorDetail
    request_id: str | None


def error_body(error: ApiError) -> bytes:
    """Return the JSON body of an error."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    detail = ErrorDetail(_TYPES.get(error.status, other), _message(error))
    detail.take_hint(error.answer.error)
    if error.answer.error.code == NO_THREADS:
        detail.details = {"error_code": NO_THREADS}
    return msgspec.json.encode(MessageErrorBody(error=detail, request_id=error.request_id))


def _message(error: ApiError) -> str:
    """Return the message; Claude Code recognizes a prompt that is too long by its begin."""
    message = error.answer.error.message
    if error.answer.error.code != "context_length_exceeded":
        return message
    message = message.removeprefix(CONTEXT_EXCEEDED)
    lengths = _LENGTHS.search(message)
    begin = f"{lengths[1]} tokens > {lengths[2]} maximum; " if lengths else ""
    return f"prompt is too long: {begin}{message}"


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
        cache=marked_hint(_marks(fields), _last_mark(fields, conversation)),
        names={BUDGET: "thinking.budget_tokens"},
        stream=isinstance(fields, MessagesRequest) and fields.stream,
    )


def _last_mark(fields: CountTokensRequest, conversation: ConvertedChat) -> PromptMark | None:
    """Return the place of a request's last mark; None: the end of the prompt.

    Templates write tools and system prompt together, so that a mark in them is one before the
    first message.
    """
    if fields.cache_control is not None or conversation.marked is not None:
        return conversation.marked if fields.cache_control is None else None
    has_system = conversation.chat[0]["role"] == "system"
    return PromptMark(1 + has_system, 0) if len(conversation.chat) > has_system else None


def _marks(fields: CountTokensRequest) -> Iterator[CacheControl | None]:
    """Yield the marks of a request, wherever they are; None where there is none."""
    yield fields.cache_control
    for tool in fields.tools:
        yield tool.cache_control
    for content in (fields.system, *(message.content for message in fields.messages)):
        yield from _marks_in(content)


def _marks_in(content: str | list[ContentBlock] | None) -> Iterator[CacheControl | None]:
    for block in content if isinstance(content, list) else ():
        yield block.cache_control
        yield from _marks_in(block.content)


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


# A string, also one that is cut off, or a character of the structure.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|[{}\[\],]', re.S)
_CLOSING = {"{": "}", "[": "]"}


def complete_object(text: str) -> dict[str, Any]:
    """Return the members of a JSON object that are complete; {} if there are none.

    The text is cut after its last complete value, and the open brackets are closed.
    """
    closings: list[str] = []
    end = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in _CLOSING:
            closings.append(_CLOSING[mark])
            end = token.end()
        elif mark in ("}", "]"):
            if not closings:
                break
            closings.pop()
            end = token.end()
        elif mark == ",":
            end = token.start()
    try:
        value = json.loads(text[:end] + "".join(reversed(closings)))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning. signature: a checksum of its text, which this server does not verify."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any] = msgspec.field(default_factory=dict)


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class TextPiece(msgspec.Struct, tag_field="type", tag="text_delta"):
    """A piece of a text block."""

    text: str


class ThinkingPiece(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """A piece of a thinking block."""

    thinking: str


class SignaturePiece(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thinking block, before its end."""

    signature: str


class InputPiece(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON text of a tool's input."""

    partial_json: str


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """The begin of a block, which is still empty."""

    index: int
    content_block: OutputBlock


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """An addition to the block that began last."""

    index: int
    delta: TextPiece | ThinkingPiece | SignaturePiece | InputPiece


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """The end of the block that began last."""

    index: int


BlockStep = BlockStart | BlockDelta | BlockStop


class BlockWriter:
    """Turn parsed events into blocks, which follow each other and never interleave.

    Text and reasoning of white space alone make no block.

    Attributes:
        num_calls: number of tool_use blocks so far.
    """

    def __init__(self, display: ThinkingDisplay) -> None:
        self.num_calls = 0
        self._display = display
        self._num_blocks = 0
        self._open: type[OutputBlock] | None = None
        self._held: tuple[type[OutputBlock], str] = (TextBlock, "")
        self._digest = hashlib.sha256()
        self._steps: list[BlockStep] = []

    def push(self, events: Iterable[AnswerEvent]) -> list[BlockStep]:
        """Return the steps of the next events."""
        for event in events:
            match event:
                case TextDelta():
                    self._add_text(event.text)
                case ReasoningDelta():
                    self._add_reasoning(event.text)
                case CallBegin():
                    self.num_calls += 1
                    self._begin(ToolUseBlock(event.id, event.name))
                case ArgumentsDelta():
                    self._add(InputPiece(event.text))
                case CallEnd():
                    self._end()
        return self._taken()

    def finish(self) -> list[BlockStep]:
        """Return the end of the last block."""
        self._end()
        return self._taken()

    def _taken(self) -> list[BlockStep]:
        steps, self._steps = self._steps, []
        return steps

    def _add_text(self, text: str) -> None:
        if text := self._visible(TextBlock, text):
            if self._open is not TextBlock:
                self._begin(TextBlock())
            self._add(TextPiece(text))

    def _add_reasoning(self, text: str) -> None:
        if not self._display.has_blocks:
            return
        if text := self._visible(ThinkingBlock, text):
            if self._open is not ThinkingBlock:
                self._begin(ThinkingBlock())
                self._digest = hashlib.sha256()
            self._digest.update(text.encode())
            if self._display.has_text:
                self._add(ThinkingPiece(text))

    def _visible(self, kind: type[OutputBlock], text: str) -> str:
        """Return what is added to a block; white space at its begin is held until text follows."""
        if self._open is kind:
            return text
        held_kind, held = self._held
        text = held + text if held_kind is kind else text
        is_held = not text or text.isspace()
        self._held = (kind, text if is_held else "")
        return "" if is_held else text

    def _begin(self, block: OutputBlock) -> None:
        self._end()
        self._open = type(block)
        self._steps.append(BlockStart(self._num_blocks, block))
        self._num_blocks += 1

    def _add(self, piece: TextPiece | ThinkingPiece | SignaturePiece | InputPiece) -> None:
        self._steps.append(BlockDelta(self._num_blocks - 1, piece))

    def _end(self) -> None:
        if self._open is None:
            return
        if self._open is ThinkingBlock:
            self._add(SignaturePiece(f"sha256:{self._digest.hexdigest()}"))
        self._steps.append(BlockStop(self._num_blocks - 1))
        self._open = None


def whole_blocks(steps: Iterable[BlockStep]) -> list[OutputBlock]:
    """Return the blocks that a client collects from the steps of a stream."""
    blocks: list[OutputBlock] = []
    pieces: list[str] = []
    for step in steps:
        match step:
            case BlockStart(content_block=block):
                blocks.append(block)
                pieces = []
            case BlockDelta(delta=SignaturePiece(signature=signature)):
                blocks[-1] = ThinkingBlock("", signature)
            case BlockDelta(delta=piece):
                pieces.append(_text_of(piece))
            case BlockStop():
                _fill(blocks[-1], "".join(pieces))
    return blocks


def _text_of(piece: TextPiece | ThinkingPiece | SignaturePiece | InputPiece) -> str:
    (text,) = msgspec.structs.astuple(piece)
    assert isinstance(text, str)
    return text


def _fill(block: OutputBlock, text: str) -> None:
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking = text
        case ToolUseBlock():
            block.input = _object(text)


def _object(text: str) -> dict[str, Any]:
    """Return the input of a call; a call that was cut off has what is complete."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = complete_object(text)
    return value if isinstance(value, dict) else {}


class MessageUsage(msgspec.Struct):
    """Token counts. input_tokens: tokens of the prompt that were computed, and are not kept.

    cache_read_input_tokens: tokens from the prefix cache. cache_creation_input_tokens: computed
    tokens that are kept there because of cache_control.
    """

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage, num_kept: int) -> "MessageUsage":
        """Return the counts of a completion.

        Args:
            usage: the server's counts.
            num_kept: tokens of the prompt that are kept in the prefix cache.
        """
        num_prompt, cached = usage.prompt_tokens, usage.cached_tokens
        created = max(num_kept - cached, 0)
        return cls(num_prompt - cached - created, usage.completion_tokens, cached, created)


class MessageBody(msgspec.Struct, kw_only=True):
    """The response of POST /v1/messages. stop_sequence: the string that ended the text."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    timings: TimingsBody | msgspec.UnsetType = msgspec.UNSET


class TokenCount(msgspec.Struct):
    """The response of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageEnd(msgspec.Struct):
    """Why a message ended."""

    stop_reason: str
    stop_sequence: str | None


def end_of(completion: Completion, num_calls: int, max_tokens: int) -> MessageEnd:
    """Return the reason for the end of a message.

    A message that was aborted has been cut off, so that it ends as one of max_tokens.
    """
    matched = completion.matched_stop
    if completion.finish_reason == "stop":
        if isinstance(matched, str):
            return MessageEnd("stop_sequence", matched)
        return MessageEnd("tool_use" if num_calls else "end_turn", None)
    is_full = completion.usage.completion_tokens < max_tokens
    if completion.finish_reason == "length" and is_full:
        return MessageEnd("model_context_window_exceeded", None)
    return MessageEnd("max_tokens", None)


_encode = msgspec.json.encode


class MessageStream(ChatRenderer):
    """ChatRenderer of Anthropic's messages."""

    def __init__(
        self, head: ResponseHead, writer: BlockWriter, max_tokens: int, kept_page: int
    ) -> None:
        self._kept_page = kept_page
        self._head = head
        self._writer = writer
        self._max_tokens = max_tokens
        self._num_kept = 0
        self._completion: Completion | None = None

    def start(self, num_prompt_tokens: int, num_kept: int = 0) -> bytes:
        """Return message_start, whose usage does not know the cached tokens yet, and a ping."""
        usage = MessageUsage(num_prompt_tokens, 0)
        self._num_kept = _in_pages(num_kept, self._kept_page)
        body = MessageBody(id=self._head.id, model=self._head.model, content=[], usage=usage)
        message = {"type": "message_start", "message": body}
        return named_event(b"message_start", _encode(message)) + named_event(
            b"ping", b'{"type":"ping"}'
        )

    def render(self, _: int, events: list[AnswerEvent], chunk: StreamChunk, /) -> bytes:
        """Return the events of the blocks."""
        steps = self._writer.push(events)
        if chunk.completion is not None:
            self._completion = chunk.completion
            steps += self._writer.finish()
        return b"".join(
            named_event(str(step.__struct_config__.tag).encode(), _encode(step)) for step in steps
        )

    def finish(self) -> bytes:
        """Return message_delta (why it ended, counts, timings) and message_stop."""
        completion = self._completion
        assert completion is not None
        delta: dict[str, Any] = {
            "type": "message_delta",
            "delta": end_of(completion, self._writer.num_calls, self._max_tokens),
            "usage": MessageUsage.of(completion.usage, self._num_kept),
            "timings": timings_body([completion]),
        }
        return named_event(b"message_delta", _encode(delta)) + named_event(
            b"message_stop", b'{"type":"message_stop"}'
        )

    def error(self, error: ApiError) -> bytes:
        """Return the event error."""
        return named_event(b"error", error_body(error))


async def messages(gateway: Gateway, call: Call, sink: EventSink) -> MessageBody | None:
    """Answer a conversation."""
    body = await call.parse()
    check_counts(body)
    sampling = take_sampling(body, SAMPLING, {})
    fields = convert(body, MessagesRequest)
    current_caller().set_user((fields.metadata or {}).get("user_id"))
    model = gateway.served(fields.model, call.record)
    chat = chat_call(fields, with_max_tokens(sampling, fields.max_tokens))
    prepared = await prepare_chat(gateway, model, chat)
    # Clients such as Claude Code ask for more tokens than the context of many models has.
    options: RequestOptions = {**prepared.options, "clamp_max_new_tokens": True}
    kept_page = await _kept_page(model, chat)
    head = model.head(call, "msg", "_")
    writer = BlockWriter(display_of(fields.thinking))
    with gateway.open_group(model, head.id, prepared.names, call.record) as group:
        in_chunks = chat.stream or prepared.reader.ends_at_repeat
        group.submit(chat.messages, prepared.params, in_chunks, options)
        if chat.stream:
            stream = MessageStream(head, writer, fields.max_tokens, kept_page)
            await stream_chat(sink, group, prepared, stream)
            return None
        (answer,) = await collect_chat(group, prepared)
        (accepted,) = await group.accepted()
    num_kept = _in_pages(accepted.num_kept, kept_page)
    return _body(head, answer, writer, fields.max_tokens, num_kept)


def _in_pages(num_kept: int, kept_page: int) -> int:
    """Return the tokens of a prompt that are kept, as far as they fill pages."""
    return num_kept // kept_page * kept_page if kept_page else 0


async def _kept_page(model: ServedModel, chat: ChatCall) -> int:
    """Return the tokens of a page of the prefix cache; 0 where the prompt is not kept."""
    if chat.cache is None:
        return 0
    size = (await model.server_info.static()).get("page_size", 1)
    assert isinstance(size, int)
    return size


async def count_tokens(gateway: Gateway, call: Call, _: EventSink) -> TokenCount:
    """Return the number of tokens of the prompt that a conversation would have."""
    body = await call.parse()
    check_counts(body)
    fields = convert(body, CountTokensRequest)
    model = gateway.served(fields.model, call.record)
    chat = chat_call(fields, Sampling(SamplingParams(), {}))
    prepared = await prepare_chat(gateway, model, chat)
    prompt: Any = chat.messages
    try:
        tokens = await model.client.tokenize(prompt, prepared.options["chat"])
    except QuadrigaError as error:
        raise from_server(error, prepared.names) from None
    return TokenCount(len(tokens))


def _body(
    head: ResponseHead, answer: ChatAnswer, writer: BlockWriter, max_tokens: int, num_kept: int
) -> MessageBody:
    completion = answer.completion
    steps = writer.push(answer.events) + writer.finish()
    end = end_of(completion, writer.num_calls, max_tokens)
    return MessageBody(
        id=head.id,
        model=head.model,
        content=whole_blocks(steps),
        stop_reason=end.stop_reason,
        stop_sequence=end.stop_sequence,
        usage=MessageUsage.of(completion.usage, num_kept),
        timings=timings_body([completion]),
    )


_ERRORS: dict[str, Any] = {"error_body": error_body, "error": MessageErrorBody}

ANTHROPIC_ENDPOINTS = [
    generating("/v1/messages", messages, "Answer a conversation, in Anthropic's format",
               MessagesRequest, MessageBody, sampling=SAMPLING, is_resumable=True, **_ERRORS),
    answering("/v1/messages/count_tokens", count_tokens, "Number of tokens of a conversation",
              CountTokensRequest, TokenCount, **_ERRORS),
]  # fmt: skip
