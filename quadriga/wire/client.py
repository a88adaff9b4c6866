"""client ⇄ tokenizer_proc: the public link, described in docs/protocol.md.

In order: addresses of clients, the messages from clients, the checks of a chat's size that gateway
and frontend share, and the messages to clients. Those of the live feed are in live.py.
"""

import enum
import secrets
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from quadriga import errors
from quadriga.errors import InvalidRequest, QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.wire import live, trace
from quadriga.wire.cache import CacheHint
from quadriga.wire.logprobs import Logprobs, PromptLogprobs

# Where the public socket is by default.
DEFAULT_ENDPOINT = "tcp://127.0.0.1:5555"
# A socket in the private directory of the run, whose path only the launcher's owner learns.
PRIVATE_ENDPOINT = "ipc"

# Addresses of clients at the public socket: the gateway's, and how the log shows the others.

NUM_ADDRESS_BYTES = 16
GATEWAY_PREFIX = b"http_proc"
NUM_SHOWN_BYTES = 4


def gateway_address() -> uuid.UUID:
    """Return a new address for a gateway. Other clients have random ones."""
    random_bytes = secrets.token_bytes(NUM_ADDRESS_BYTES - len(GATEWAY_PREFIX))
    return uuid.UUID(bytes=GATEWAY_PREFIX + random_bytes)


def is_gateway(client: bytes) -> bool:
    """Return whether an address is a gateway's, which logs its requests itself."""
    return client.startswith(GATEWAY_PREFIX)


def short_address(client: bytes) -> str:
    """Return the begin of an address, as the log shows it."""
    return client[:NUM_SHOWN_BYTES].hex()


# client -> tokenizer_proc: one half of the public link, described in docs/protocol.md.

PROTOCOL_VERSION = 1
# A larger public frame is refused with an error; one of twice this size ends the connection.
MAX_FRAME_BYTES = 16 * 1024 * 1024
# Bounds of one chat, which quadriga/wire/client.py checks.
MAX_TURNS = 4096
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 256
MAX_TOOL_CALLS = 4096
MAX_TOOLS = 1024
MAX_TEMPLATE_ARGS = 64
MAX_PROGRESS_IDS = 64
MAX_TRACE_IDS = 64
MAX_CACHE_SALT_CHARS = 256


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn of a chat; a map on the wire. Empty fields are not passed to the chat template.

    Attributes:
        name: name of the tool that answers.
        tool_calls: tool calls of an assistant's turn.
        tool_call_id: id of the call that a tool answers.
        reasoning_content: reasoning of an assistant's turn.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    reasoning_content: str = ""


class ChatOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Input of a chat template beside the messages; a map on the wire.

    Attributes:
        tools: JSON schemas of functions in OpenAI's form.
        template_args: further variables of the template, for example enable_thinking.
        continue_final_message: the answer continues the last message, which is the assistant's;
            then `add_generation_prompt` must be false.
        add_generation_prompt: end the prompt with the beginning of the assistant's next turn.
    """

    tools: list[dict[str, Any]] = []
    template_args: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Ask for one completion.

    Attributes:
        prompt: a string, or a chat as a list of ChatMessage maps.
        stream: send chunks as tokens come; False: one chunk at the end.
        truncate_prompt: keep the last tokens of a prompt that is longer than the context; None:
            the server's --allow-auto-truncate.
        prompt_token_ids: int32 bytes, in place of a prompt, which is then empty.
        priority: -1000 to 1000, the largest first, if the server schedules by priority.
        queue_timeout: seconds from arrival until the request must be admitted; then it ends with
            deadline_exceeded. None: the server's --queue-timeout.
        timeout: the same until its end. None: the server's --request-timeout.
        chat: input of the chat template, if the prompt is a chat.
        clamp_max_new_tokens: if the context leaves less than max_new_tokens, generate that number
            instead of failing.
        resent: the client has sent the request before, over a connection that was lost. A known
            request continues; a Replay precedes its other messages, empty if the request starts
            again from its first token.
        acknowledge: send an Accepted before all other messages of the request.
        tenant: owner of a gateway's request; ignored from other clients.
        keep_s: seconds for which the request goes on while its client is gone. None: it is aborted
            with the loss of its client.
        traceparent: the caller's span, as in W3C Trace Context; a malformed one is ignored.
        cache_salt: cached prefixes are shared only with requests of the same salt, at most
            MAX_CACHE_SALT_CHARS characters; "": with those without one.
        adapter: name of the adapter of the model that answers; "": the model itself.
        cache: keep what the request computes in the prefix cache after its end; None: as long as
            there is room.
    """

    version: int
    request_id: str
    prompt: str | list[ChatMessage]
    params: SamplingParams = SamplingParams()
    stream: bool = True
    truncate_prompt: bool | None = None
    prompt_token_ids: bytes | None = None
    priority: int = 0
    queue_timeout: float | None = None
    timeout: float | None = None
    chat: ChatOptions = ChatOptions()
    clamp_max_new_tokens: bool = False
    resent: bool = False
    acknowledge: bool = False
    tenant: str = ""
    keep_s: float | None = None
    traceparent: str = ""
    cache_salt: str = ""
    adapter: str = ""
    cache: CacheHint | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Abort a request of this client, or all if the id is empty. Unknown ids are ignored."""

    version: int
    request_id: str


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Ask for a Pong, which the frontend sends at once."""

    version: int


class GetInfo(msgspec.Struct, tag="get_info", array_like=True, frozen=True):
    """Ask for an Info, which is collected from all processes."""

    version: int
    request_id: str


class Tokenize(msgspec.Struct, tag="tokenize", array_like=True, frozen=True):
    """Ask for the Tokens that a Generate of this prompt would have.

    Attributes:
        with_text: the answer has the text of the prompt too, a chat as its template writes it.
    """

    version: int
    request_id: str
    prompt: str | list[ChatMessage]
    chat: ChatOptions = ChatOptions()
    with_text: bool = False


class Detokenize(msgspec.Struct, tag="detokenize", array_like=True, frozen=True):
    """Ask for the Text of token ids (int32 bytes)."""

    version: int
    request_id: str
    token_ids: bytes
    skip_special_tokens: bool = True


class FlushCache(msgspec.Struct, tag="flush_cache", array_like=True, frozen=True):
    """Drop cached prefixes that no request uses.

    The answer is an Info with the additional value `flushed_pages`.
    """

    version: int
    request_id: str


class ReleaseCache(msgspec.Struct, tag="release_cache", array_like=True, frozen=True):
    """Release what requests have asked to keep (Generate.cache), so that it may be evicted.

    The answer is an Info with the additional value `released_pins`.

    Attributes:
        key: that of CacheHint; None: everything of the client's tenant.
        tenant: owner of a gateway's request; ignored from other clients.
    """

    version: int
    request_id: str
    key: str | None = None
    tenant: str = ""


class GetProgress(msgspec.Struct, tag="get_progress", array_like=True, frozen=True):
    """Ask for the ProgressAnswer of some requests of this client, at most MAX_PROGRESS_IDS."""

    version: int
    request_id: str
    request_ids: list[str]


class GetTraces(msgspec.Struct, tag="get_traces", array_like=True, frozen=True):
    """Ask for the Traces of ended requests of this client, at most MAX_TRACE_IDS."""

    version: int
    request_id: str
    request_ids: list[str]


class Watch(msgspec.Struct, tag="watch", array_like=True, frozen=True):
    """Watch the live feed for some seconds, or longer; it is answered by the feed's messages.

    Attributes:
        seconds: time from now on, at most MAX_WATCH_S; 0: stop.
        replica: number of the replica whose steps are watched.
    """

    version: int
    request_id: str
    seconds: float = 10.0
    replica: int = 0


ClientMessage = (
    Generate
    | Abort
    | Ping
    | GetInfo
    | Tokenize
    | Detokenize
    | FlushCache
    | ReleaseCache
    | GetProgress
    | GetTraces
    | Watch
)


# Checks of a chat's size, by the web gateway and the frontend.
#
# Each turn costs work, so that the number of turns is bounded, not only the number of bytes.


class Turn(Protocol):
    """The checked fields of ChatMessage and of the web gateway's Message."""

    @property
    def role(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def tool_calls(self) -> Sequence[object] | None: ...
    @property
    def tool_call_id(self) -> str | None: ...


def check_chat(messages: Sequence[Turn]) -> None:
    """Raise InvalidRequest for a chat without turns or over one of the bounds."""
    if not messages:
        raise _refused("has no turns: a chat needs at least one")
    check_num_turns(len(messages))
    num_tool_calls = 0
    for index, turn in enumerate(messages):
        _check_chars(index, "role", turn.role, MAX_ROLE_CHARS)
        _check_chars(index, "name", turn.name or "", MAX_NAME_CHARS)
        _check_chars(index, "tool_call_id", turn.tool_call_id or "", MAX_NAME_CHARS)
        num_tool_calls += len(turn.tool_calls or ())
    _check_count(num_tool_calls, "tool calls", MAX_TOOL_CALLS, "prompt")


def check_num_turns(num_turns: int) -> None:
    """Raise InvalidRequest for too many turns, before each of them is checked."""
    _check_count(num_turns, "turns", MAX_TURNS, "prompt")


def check_num_tools(num_tools: int) -> None:
    """Raise InvalidRequest for too many tools."""
    _check_count(num_tools, "functions", MAX_TOOLS, "tools")


def check_chat_options(options: ChatOptions) -> None:
    """Raise InvalidRequest for too many tools or template variables."""
    check_num_tools(len(options.tools))
    _check_count(len(options.template_args), "variables", MAX_TEMPLATE_ARGS, "template_args")
    longest = max(map(len, options.template_args), default=0)
    if longest > MAX_NAME_CHARS:
        raise InvalidRequest(
            f"template_args has a name of {longest} characters: at most {MAX_NAME_CHARS} are"
            " allowed; shorten it",
            "template_args",
        )


def _check_chars(index: int, what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise _refused(
            f"has a {what} of {len(text)} characters in turn {index}: at most {most} are allowed;"
            " shorten it"
        )


def _check_count(count: int, what: str, most: int, field: str) -> None:
    if count > most:
        raise InvalidRequest(
            f"{field} has {count} {what}: at most {most} are allowed; leave some out", field
        )


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"prompt {reason}", "prompt")


# tokenizer_proc -> client: one half of the public link, described in docs/protocol.md.

_encode = msgspec.msgpack.Encoder().encode


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """An error on the wire.

    Attributes:
        code: `code` of a class in quadriga/errors.py.
        field: the request's field that is wrong, or "".
        retry_after: seconds after which a retry may succeed, if the server was too busy.
    """

    code: str
    message: str
    field: str = ""
    retry_after: float | None = None

    @classmethod
    def of(cls, error: QuadrigaError) -> "ErrorInfo":
        """Return the wire form of an exception."""
        field, retry_after = getattr(error, "field", ""), getattr(error, "retry_after", None)
        return cls(error.code, str(error), field, retry_after)

    def exception(self) -> QuadrigaError:
        """Return the exception of this error."""
        return errors.from_code(self.code, self.message, self.field, self.retry_after)


class RefusalInfo(msgspec.Struct, array_like=True, frozen=True):
    """The error of a Refused.

    Attributes:
        code, message, field, retry_after: as in ErrorInfo.
        queue_position, expected_wait: as in QueueFull.
    """

    code: str
    message: str
    field: str = ""
    retry_after: float | None = None
    queue_position: int | None = None
    expected_wait: float | None = None

    @classmethod
    def of(cls, error: QuadrigaError) -> "RefusalInfo":
        """Return the wire form of an exception."""
        info = ErrorInfo.of(error)
        hint = getattr(error, "queue_position", None), getattr(error, "expected_wait", None)
        return cls(info.code, info.message, info.field, info.retry_after, *hint)

    def exception(self) -> QuadrigaError:
        """Return the exception of this error."""
        error = errors.from_code(self.code, self.message, self.field, self.retry_after)
        if isinstance(error, errors.QueueFull):
            error.queue_position, error.expected_wait = self.queue_position, self.expected_wait
        return error


# The error of an end, or that of a refusal.
AnyErrorInfo = ErrorInfo | RefusalInfo


class Usage(msgspec.Struct, array_like=True, frozen=True):
    """Numbers of tokens; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class StageTimes(msgspec.Struct, array_like=True, frozen=True):
    """Unix time at which the request reached each stage; 0.0 for a stage that it did not reach."""

    received: float
    tokenized: float
    admitted: float
    first_token: float
    detokenized: float


class End(msgspec.Struct, array_like=True, frozen=True):
    """The only terminal message of a request, in its last chunk.

    Attributes:
        finish_reason: stop, length, abort or error.
        matched_stop: stop string or stop token id that ended the text.
    """

    finish_reason: str
    usage: Usage
    times: StageTimes
    matched_stop: str | int | None = None
    error: ErrorInfo | None = None


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """New text and tokens of one choice of a request.

    Attributes:
        text_offset: number of characters of this choice's text that were sent before.
        token_ids: int32 bytes.
        token_times: end of the step that sampled each token, in Unix seconds; 0.0 of one that was
            given (SamplingParams.first_token_ids).
        index: index of the choice; each choice of `n` has its own chunks and end.
        logprobs: logprobs of `token_ids`.
        prompt_logprobs: logprobs of the prompt, in the first chunk of choice 0.
        text_lengths: number of characters that each of `token_ids` adds to the text; what is left
            of the text belongs to the end. None for a single token without an end, and where they
            were not requested.
        vector: float32 bytes, little-endian, with the end of a request for a vector.
    """

    request_id: str
    text_offset: int
    text: str
    token_ids: bytes
    token_times: list[float]
    end: End | None = None
    index: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    text_lengths: list[int] | None = None
    vector: bytes | None = None

    def shortest(self) -> tuple[Any, ...]:
        """Return the fields that are sent: most chunks have nothing in the last few."""
        head = (
            self.request_id, self.text_offset, self.text, self.token_ids, self.token_times, self.end
        )  # fmt: skip
        if self.vector is not None:
            rest = (self.index, self.logprobs, self.prompt_logprobs, self.text_lengths)
            return (*head, *rest, self.vector)
        if self.text_lengths is not None:
            rest = (self.index, self.logprobs, self.prompt_logprobs, self.text_lengths)
            return (*head, *rest)
        if self.index or self.logprobs is not None or self.prompt_logprobs is not None:
            return (*head, self.index, self.logprobs, self.prompt_logprobs)
        return head


class Chunks(msgspec.Struct, tag="chunks", array_like=True, frozen=True):
    """Everything new for one client after one step."""

    chunks: list[Chunk]


class Replay(msgspec.Struct, tag="replay", array_like=True, frozen=True):
    """Requests from their first token on.

    Each chunk has offset 0 and replaces everything before it of its choice; later chunks continue
    from there.
    """

    chunks: list[Chunk]


def encode_chunks(message: Chunks | Replay) -> bytes:
    """Return the frame of a message with each chunk in its shortest form."""
    tag = message.__struct_config__.tag
    return _encode((tag, [chunk.shortest() for chunk in message.chunks]))


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Refusal of a message; the terminal message of its request, if it has an id."""

    request_id: str
    error: RefusalInfo

    @classmethod
    def of(cls, request_id: str, error: QuadrigaError) -> "Refused":
        """Return the refusal with the error of an exception."""
        return cls(request_id, RefusalInfo.of(error))


class Accepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """A request is prepared and goes to the scheduler, which may still refuse it.

    Attributes:
        num_prompt_tokens: length of the prompt as it runs, after a cut.
        prompt_end: the last characters of the rendered chat; "" for other prompts.
        num_kept: tokens of the prompt that stay in the prefix cache because the request asks for
            it (Generate.cache), as far as they fill pages.
    """

    request_id: str
    num_prompt_tokens: int
    prompt_end: str = ""
    num_kept: int = 0


class PlainAccepted(msgspec.Struct, tag="accepted", array_like=True, frozen=True):
    """An Accepted as it is sent for a request that keeps nothing: with the first three fields."""

    request_id: str
    num_prompt_tokens: int
    prompt_end: str


class AdapterUsed(msgspec.Struct, tag="adapter", array_like=True, frozen=True):
    """Comes before all that is generated for a request that names an adapter.

    Attributes:
        adapter: id of the adapter that the request runs with, a hash of its content.
    """

    request_id: str
    adapter: str


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True):
    """Answer to Ping. `instance` is another one after each start of the server."""

    version: int
    instance: str
    max_frame_bytes: int


class Probe(msgspec.Struct, tag="probe", array_like=True, frozen=True):
    """A message to be ignored; sending it shows the server whether the client is connected."""


class ServerGone(msgspec.Struct, tag="server_gone", array_like=True, frozen=True):
    """The server ends or disconnects this client, whose open requests end with this error."""

    error: ErrorInfo


# Numbers, texts, and maps of them.
InfoValues = dict[str, Any]


class Info(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """Gauges and counters of the server; docs/protocol.md lists the keys of `values`."""

    request_id: str
    values: InfoValues


class RequestState(str, enum.Enum):
    """How far a request is. UNKNOWN: it has ended, or the server does not know it."""

    PREPARING = "preparing"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODING = "decoding"
    UNKNOWN = "unknown"


class RequestProgress(msgspec.Struct, array_like=True, frozen=True):
    """How far a request is, or the furthest of its choices.

    Attributes:
        place: place in the waiting queue, if it is queued; 1 is admitted next.
        wait_s: estimated seconds until it is admitted, if it is queued; None: no estimate yet.
        num_computed_tokens: tokens of the prompt that are computed, are being computed, or came
            from the prefix cache.
        num_prompt_tokens: all tokens of the prompt; 0 while they are not known.
    """

    state: RequestState
    place: int = 0
    wait_s: float | None = None
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0


class ProgressAnswer(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """Answer to GetProgress: a value for each of its request_ids, in order."""

    request_id: str
    values: list[RequestProgress]


class Traces(msgspec.Struct, tag="traces", array_like=True, frozen=True):
    """Answer to GetTraces: the traces that are kept, one for each choice of each request."""

    request_id: str
    traces: list[trace.RequestTrace]


class Tokens(msgspec.Struct, tag="tokens", array_like=True, frozen=True):
    """Answer to Tokenize; `token_ids` are int32 bytes, and `text` is "" unless asked for."""

    request_id: str
    token_ids: bytes
    text: str = ""


class Text(msgspec.Struct, tag="text", array_like=True, frozen=True):
    """Answer to Detokenize."""

    request_id: str
    text: str


ServerMessage = (
    Chunks
    | Replay
    | Refused
    | Accepted
    | AdapterUsed
    | Pong
    | Probe
    | ServerGone
    | Info
    | Tokens
    | Text
    | ProgressAnswer
    | Traces
    | live.LiveStep
    | live.LiveServer
)
