"""client ⇄ tokenizer_proc: the public link, described in docs/protocol.md."""

from typing import Any

import msgspec

from quadriga import errors
from quadriga.errors import QuadrigaError
from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.logprobs import Logprobs, PromptLogprobs

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""A larger public frame is refused by name; twice as much ends the connection."""
MAX_TURNS = 4096
"""Of one chat. These bounds, with those below, are held by quadriga/wire/chat_limits.py."""
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 256
"""Of a turn's name and tool_call_id."""
MAX_TOOL_CALLS = 4096
"""Of all turns of a chat."""
MAX_TOOLS = 1024
MAX_TEMPLATE_ARGS = 64


# --- client -> tokenizer_proc ---------------------------------------------------------------------


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn of a chat; a map on the wire. What is not empty reaches the chat template.

    tool_calls: of an assistant's turn; tool_call_id and name: of a tool's answer.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""


class ChatOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a chat template is given beside the messages; a map on the wire.

    tools: JSON schemas of functions, as OpenAI writes them. template_args: further variables of
    the template, for example enable_thinking.
    """

    tools: list[dict[str, Any]] = []
    template_args: dict[str, Any] = {}


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Ask for one completion.

    prompt: a string, or a chat as a list of ChatMessage maps.
    stream: chunks as tokens come; else one chunk at the end.
    truncate_prompt: keep the last tokens of a prompt that is longer than the context; None: as
        the server was started (--allow-auto-truncate).
    prompt_token_ids: int32 bytes, instead of a prompt, which is then empty: nothing is encoded.
    priority: larger goes first, -1000 to 1000, where the server schedules by priority.
    queue_timeout: seconds until the request must have been admitted; timeout: until it must have
        ended. Both count from its arrival and end it with deadline_exceeded. None: as the server
        was started (--queue-timeout, --request-timeout).
    chat: for the chat template, where the prompt is a chat.
    clamp_max_new_tokens: where the context leaves less than max_new_tokens, that much is generated
        instead of an error.
    resent: it was sent before, over a connection that was lost. Where the request is known it goes
        on; a Replay comes before anything else of it, an empty one where it begins anew.
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


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End a request of this client; an empty id ends all of them. Unknown ids are ignored."""

    version: int
    request_id: str


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Answered at once by the front door with a Pong."""

    version: int


class GetInfo(msgspec.Struct, tag="get_info", array_like=True, frozen=True):
    """Answered with an Info that has travelled the whole ring."""

    version: int
    request_id: str


class Tokenize(msgspec.Struct, tag="tokenize", array_like=True, frozen=True):
    """Answered by the front door with the Tokens that a Generate of this prompt would have."""

    version: int
    request_id: str
    prompt: str | list[ChatMessage]
    chat: ChatOptions = ChatOptions()


class Detokenize(msgspec.Struct, tag="detokenize", array_like=True, frozen=True):
    """Answered by the front door with a Text. token_ids: int32 bytes."""

    version: int
    request_id: str
    token_ids: bytes
    skip_special_tokens: bool = True


class FlushCache(msgspec.Struct, tag="flush_cache", array_like=True, frozen=True):
    """Forget cached prefixes that nobody uses now. Answered with an Info that has travelled the
    whole ring, with `flushed_pages` beside its other values."""

    version: int
    request_id: str


ClientMessage = Generate | Abort | Ping | GetInfo | Tokenize | Detokenize | FlushCache


# --- tokenizer_proc -> client ---------------------------------------------------------------------


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """code: as in quadriga/errors.py; field: the request's field that is to blame, or "".

    retry_after: seconds after which it may pay to try again, where the server was too busy.
    """

    code: str
    message: str
    field: str = ""
    retry_after: float | None = None

    @classmethod
    def of(cls, error: QuadrigaError) -> "ErrorInfo":
        """How an exception travels."""
        field, retry_after = getattr(error, "field", ""), getattr(error, "retry_after", None)
        return cls(error.code, str(error), field, retry_after)

    def exception(self) -> QuadrigaError:
        """The exception that travelled."""
        return errors.from_code(self.code, self.message, self.field, self.retry_after)


class Usage(msgspec.Struct, array_like=True, frozen=True):
    """Tokens. cached_tokens: how many of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class StageTimes(msgspec.Struct, array_like=True, frozen=True):
    """When the request passed each stage, in Unix seconds; 0.0 where it never came there."""

    received: float
    tokenized: float
    admitted: float
    first_token: float
    detokenized: float


class End(msgspec.Struct, array_like=True, frozen=True):
    """The one terminal message of a request, in its last chunk.

    finish_reason: stop, length, abort or error; matched_stop: the stop string or token id.
    """

    finish_reason: str
    usage: Usage
    times: StageTimes
    matched_stop: str | int | None = None
    error: ErrorInfo | None = None


class PlainChunk(msgspec.Struct, array_like=True, frozen=True):
    """What is new of one request.

    text_offset: characters of this choice's text that were sent before.
    token_ids: int32 bytes; token_times: for each of them, the end of the step that gave it.
    """

    request_id: str
    text_offset: int
    text: str
    token_ids: bytes
    token_times: list[float]
    end: End | None = None


class Chunk(PlainChunk, array_like=True, frozen=True):
    """A chunk with what only some requests ask for; the fields stay off the wire for the others.

    index: of the choice, where `n` were asked for: each has chunks and an end of its own.
    logprobs: of token_ids. prompt_logprobs: in the first chunk of choice 0.
    """

    index: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Chunks(msgspec.Struct, tag="chunks", array_like=True, frozen=True):
    """All that is new for one client after one step, as a client reads it."""

    chunks: list[Chunk]


class SentChunks(msgspec.Struct, tag="chunks", array_like=True, frozen=True):
    """The same as it is sent: a PlainChunk where it says all."""

    chunks: list[PlainChunk]


class Replay(msgspec.Struct, tag="replay", array_like=True, frozen=True):
    """Requests from their first token on, as a client reads it: each chunk has offset 0 and all
    text and ids of its choice up to now, in place of what came before. What follows goes on there.
    """

    chunks: list[Chunk]


class SentReplay(msgspec.Struct, tag="replay", array_like=True, frozen=True):
    """The same as it is sent: a PlainChunk where it says all."""

    chunks: list[PlainChunk]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A message that never entered; the terminal message of its request, if it had an id."""

    request_id: str
    error: ErrorInfo


class Pong(msgspec.Struct, tag="pong", array_like=True, frozen=True):
    """instance: drawn anew at each start of the server."""

    version: int
    instance: str
    max_frame_bytes: int


class Probe(msgspec.Struct, tag="probe", array_like=True, frozen=True):
    """Nothing to do: it lets the server find out whether the client is still there."""


class ServerGone(msgspec.Struct, tag="server_gone", array_like=True, frozen=True):
    """The server ends or cut this client off: each of the client's open requests ends with this."""

    error: ErrorInfo


InfoValues = dict[str, Any]
"""Numbers, texts, and maps of them."""


class Info(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """`values` is a map; its keys are listed in docs/protocol.md."""

    request_id: str
    values: InfoValues


class Tokens(msgspec.Struct, tag="tokens", array_like=True, frozen=True):
    """The answer to Tokenize. token_ids: int32 bytes."""

    request_id: str
    token_ids: bytes


class Text(msgspec.Struct, tag="text", array_like=True, frozen=True):
    """The answer to Detokenize."""

    request_id: str
    text: str


ServerMessage = Chunks | Replay | Refused | Pong | Probe | ServerGone | Info | Tokens | Text
