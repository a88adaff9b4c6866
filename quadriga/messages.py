"""Every message that crosses a process boundary, one section per link.

A frame is one msgpack array `[tag, *fields]`. Lists of token ids, slots, counts and pages travel
as little-endian int32 bytes (`pack_ids`, `unpack_ids`). Times are Unix seconds: one clock that
every process and a client on the same machine can compare. `docs/protocol.md` describes the
public link for clients in other languages.
"""

import sys
from array import array
from collections.abc import Iterable

import msgspec

from quadriga.sampling import SamplingParams

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 1024 * 1024
"""A larger public frame is refused by name; ten times as much ends the connection."""


def pack_ids(ids: Iterable[int]) -> bytes:
    """Integers as little-endian int32 bytes. OverflowError where one does not fit."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> "array[int]":
    """The inverse of pack_ids. ValueError where the length is no multiple of 4."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


# --- client -> tokenizer_proc (public) -----------------------------------------------------------


class ChatMessage(msgspec.Struct):
    """One turn of a chat; a map on the wire. Further keys reach the chat template untouched."""

    role: str
    content: str


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Ask for one completion.

    prompt: a string, or a chat as a list of {role, content} maps.
    stream: chunks as tokens come; else one chunk at the end.
    truncate_prompt: keep the last tokens of a prompt that is longer than the context; None: as
        the server was started (--allow-auto-truncate).
    prompt_token_ids: int32 bytes, instead of a prompt, which is then empty: nothing is encoded.
    priority: larger goes first, -1000 to 1000, where the server schedules by priority.
    queue_timeout: seconds until the request must have been admitted; timeout: until it must have
        ended. Both count from its arrival and end it with deadline_exceeded. None: as the server
        was started (--queue-timeout, --request-timeout).
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


ClientMessage = Generate | Abort | Ping | GetInfo


# --- tokenizer_proc -> client (public) -----------------------------------------------------------


class ErrorInfo(msgspec.Struct, array_like=True, frozen=True):
    """code: as in quadriga/errors.py; field: the request's field that is to blame, or ""."""

    code: str
    message: str
    field: str = ""


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


class Chunk(msgspec.Struct, array_like=True, frozen=True):
    """What is new of one request.

    text_offset: characters of this request's text that were sent before.
    token_ids: int32 bytes; token_times: for each of them, the end of the step that gave it.
    """

    request_id: str
    text_offset: int
    text: str
    token_ids: bytes
    token_times: list[float]
    end: End | None = None


class Chunks(msgspec.Struct, tag="chunks", array_like=True, frozen=True):
    """All that is new for one client after one step."""

    chunks: list[Chunk]


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


InfoValues = dict[str, str | int | float | bool | dict[str, int] | None]


class Info(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """`values` is a map; its keys are listed in docs/protocol.md."""

    request_id: str
    values: InfoValues


ServerMessage = Chunks | Refused | Pong | Probe | ServerGone | Info


# --- tokenizer_proc, detok_proc -> scheduler_proc -------------------------------------------------


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A validated, tokenised request. client: the ROUTER's address of the one who asked.

    params: max_new_tokens and seed are filled in.
    queue_deadline, deadline: Unix seconds; None where there is none.
    """

    client: bytes
    request_id: str
    prompt_ids: bytes
    params: SamplingParams
    stream: bool
    received: float
    tokenized: float
    priority: int = 0
    queue_deadline: float | None = None
    deadline: float | None = None


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End one request of a client, or with an empty id all of them."""

    client: bytes
    request_id: str


class StopFound(msgspec.Struct, tag="stop_found", array_like=True, frozen=True):
    """The detokenizer met a stop string in these requests."""

    seqs: list[int]


class Inspect(msgspec.Struct, tag="inspect", array_like=True, frozen=True):
    """A client's GetInfo, on its way round the ring: each process adds what it knows."""

    client: bytes
    request_id: str
    values: InfoValues


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Nothing new will come: finish what is there, then stop and pass Stop on."""


class AbortAll(msgspec.Struct, tag="abort_all", array_like=True, frozen=True):
    """End every request now, for this reason."""

    reason: str


SchedulerMessage = Submit | AbortRequest | StopFound | Inspect | Drain | AbortAll


# --- scheduler_proc -> worker_proc ----------------------------------------------------------------

EXTEND, DECODE, MIXED = 0, 1, 2
"""ForwardMode on the wire."""


class NewSlot(msgspec.Struct, array_like=True, frozen=True):
    """A request enters a slot.

    token_ids: every token known so far (int32 bytes); computed: how many of them are in the KV
    pages already; pages: its page table (int32 bytes), long enough for the tokens known so far.
    """

    slot: int
    token_ids: bytes
    computed: int
    pages: bytes
    temperature: float
    top_k: int
    top_p: float
    seed: int


class StepPlan(msgspec.Struct, tag="plan", array_like=True, frozen=True):
    """One forward step, as deltas against what the worker keeps of each slot.

    The worker first forgets `released`, then takes in `new`, appends to page tables what `grown`
    says (int32 bytes: slot, page, slot, page, ...), then computes for row i the next num_tokens[i]
    tokens of slots[i]. A row whose computed tokens reach all that is known of its slot samples one
    token, which the worker keeps as that slot's next input.

    Pages may be shared: a row reads what an earlier plan, or an earlier row of this same plan,
    computed. So every row's keys and values of a layer are written before any row attends.
    """

    step: int
    forward_mode: int
    slots: bytes
    num_tokens: bytes
    new: list[NewSlot]
    released: bytes
    grown: bytes = b""


class StopWorker(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Nothing follows; leave."""


WorkerMessage = StepPlan | StopWorker


# --- worker_proc -> scheduler_proc ----------------------------------------------------------------


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The KV pool as it came out. Pages are numbered 0 to num_pages - 1."""

    num_pages: int
    page_size: int
    num_slots: int
    dtype: str
    device: str
    pid: int = 0


class StepResult(msgspec.Struct, tag="result", array_like=True, frozen=True):
    """Tokens of a step, one per row of its plan (int32 bytes), -1 for a row that did not sample.

    began, ended: Unix seconds around forward and sampling.
    """

    step: int
    token_ids: bytes
    began: float
    ended: float


ResultMessage = WorkerReady | StepResult


# --- scheduler_proc -> detok_proc -----------------------------------------------------------------


class OpenText(msgspec.Struct, array_like=True, frozen=True):
    """A request gave its first token: what the detokenizer must know of it from now on."""

    seq: int
    client: bytes
    request_id: str
    stream: bool
    skip_special_tokens: bool
    stop_strings: list[str]


class CloseText(msgspec.Struct, array_like=True, frozen=True):
    """A request ends, for `finish_reason`; the detokenizer adds the time and sends the End.

    prompt_tokens: int; the count of completion tokens is the detokenizer's own.
    """

    seq: int
    client: bytes
    request_id: str
    finish_reason: str
    matched_stop: int | None
    error: ErrorInfo | None
    prompt_tokens: int
    cached_tokens: int
    received: float
    tokenized: float
    admitted: float
    first_token: float


class StepOutput(msgspec.Struct, tag="output", array_like=True, frozen=True):
    """What one step gave: `opened` first, then token_ids[i] for seqs[i], then `closed`.

    seqs: int64s would do; they are plain ints because a server may live long.
    time: the end of the step in Unix seconds, the time of each of its tokens.
    """

    time: float
    opened: list[OpenText]
    seqs: list[int]
    token_ids: bytes
    closed: list[CloseText]


class InfoReply(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """An Info on its way to its client."""

    client: bytes
    info: Info


class StopDetok(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Nothing follows; pass the end on to the tokenizer and leave."""


DetokMessage = StepOutput | InfoReply | StopDetok


# --- detok_proc -> tokenizer_proc -----------------------------------------------------------------
# Two frames: the client's address, and the public message as it will be sent, already encoded.
# An empty address with an empty message says that nothing follows.
