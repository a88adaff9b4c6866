"""tokenizer_proc -> client: one half of the public link, described in docs/protocol.md."""

import enum
from typing import Any

import msgspec

from quadriga import errors
from quadriga.errors import QuadrigaError
from quadriga.wire.messages.live import LiveServer, LiveStep
from quadriga.wire.messages.logprobs import Logprobs, PromptLogprobs
from quadriga.wire.messages.trace import RequestTrace

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
        token_times: end of the step that sampled each token, in Unix seconds.
        index: index of the choice; each choice of `n` has its own chunks and end.
        logprobs: logprobs of `token_ids`.
        prompt_logprobs: logprobs of the prompt, in the first chunk of choice 0.
        text_lengths: number of characters that each of `token_ids` adds to the text; what is left
            of the text belongs to the end. None for a single token without an end, and where they
            were not requested.
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

    def shortest(self) -> tuple[Any, ...]:
        """Return the fields that are sent: most chunks have nothing in the last three or four."""
        head = (
            self.request_id, self.text_offset, self.text, self.token_ids, self.token_times, self.end
        )  # fmt: skip
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
    """

    request_id: str
    num_prompt_tokens: int
    prompt_end: str = ""


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
    traces: list[RequestTrace]


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
    | Pong
    | Probe
    | ServerGone
    | Info
    | Tokens
    | Text
    | ProgressAnswer
    | Traces
    | LiveStep
    | LiveServer
)
