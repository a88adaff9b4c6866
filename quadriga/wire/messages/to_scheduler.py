"""tokenizer_proc, detok_proc -> scheduler_proc."""

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.public import InfoValues


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A validated, tokenized request.

    Attributes:
        client: the client's address at the public ROUTER socket.
        params: without anything left open, and without the grammar.
        received_at, tokenized_at, queue_deadline, deadline: Unix seconds.
        bad_words: token ids (int32 bytes) of each.
        client_retry: the client has sent the request before (Generate.resent).
        frontend_retry: the frontend has sent it to a scheduler before, perhaps not to this one.
    """

    client: bytes
    request_id: str
    prompt_ids: bytes
    params: SamplingParams
    stream: bool
    received_at: float
    tokenized_at: float
    priority: int = 0
    queue_deadline: float | None = None
    deadline: float | None = None
    bad_words: list[bytes] = []
    grammar: GrammarForm | None = None
    client_retry: bool = False
    frontend_retry: bool = False


CLIENT, CLIENT_LOST, SERVER_STOPPING = "client", "client_lost", "server_stopping"
"""By whose doing a request is aborted."""


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End one request of a client, or with an empty id all of them. by: CLIENT, which asked for
    it, or CLIENT_LOST, where it is gone or was cut off."""

    client: bytes
    request_id: str
    by: str = CLIENT


class StopFound(msgspec.Struct, tag="stop_found", array_like=True, frozen=True):
    """The detokenizer met a stop string in these requests."""

    seqs: list[int]


class DetokReady(msgspec.Struct, tag="detok", array_like=True, frozen=True):
    """A detokenizer that knows no text. session: drawn by it; what is for another one is stale."""

    session: int


class EndsDelivered(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The front door has the ends of these requests."""

    seqs: list[int]


class FrontendRestarted(msgspec.Struct, tag="front_door", array_like=True, frozen=True):
    """The one before it died, perhaps with ends that nobody was told of."""


class InfoRequest(msgspec.Struct, tag="inspect", array_like=True, frozen=True):
    """A client's GetInfo, on its way round the ring: each process adds what it knows.

    flush_cache: forget the cached prefixes that nobody uses before that.
    """

    client: bytes
    request_id: str
    values: InfoValues
    flush_cache: bool = False


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Nothing new will come: finish what is there, then say Drained."""


class Shutdown(msgspec.Struct, tag="leave", array_like=True, frozen=True):
    """The clients have everything, and the front door leaves: so does everybody."""


class AbortAll(msgspec.Struct, tag="abort_all", array_like=True, frozen=True):
    """End every request now, for this reason."""

    reason: str


SchedulerMessage = (
    Submit
    | AbortRequest
    | StopFound
    | DetokReady
    | EndsDelivered
    | FrontendRestarted
    | InfoRequest
    | Drain
    | Shutdown
    | AbortAll
)
