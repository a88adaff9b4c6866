"""tokenizer_proc, detok_proc -> scheduler_proc."""

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import InfoValues
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.trace import Span, TraceContext


class ChoiceProgress(msgspec.Struct, array_like=True, frozen=True):
    """A choice of a request that moves to another scheduler.

    Attributes:
        token_ids: its generated tokens, int32 bytes. They are final: the client may have them.
        first_token_at: Unix seconds; 0.0 without a token.
        admitted_at, cached_tokens: of its first admission at a replica that has computed its prompt
            for this one, as in MovableChoice; 0: it has not.
        logprobs, prompt_logprobs, spans: of that replica, as in MovableChoice.
    """

    index: int
    token_ids: bytes = b""
    first_token_at: float = 0.0
    admitted_at: float = 0.0
    cached_tokens: int = 0
    logprobs: list[LogprobBlock] = []
    prompt_logprobs: list[LogprobBlock] = []
    spans: list[Span] = []


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A validated, tokenized request, or some choices of it, which a scheduler shall run.

    A placement gives choices to a replica: new ones, or those of a request that its client has sent
    again. The frontend numbers placements upwards, from a larger number on than any frontend
    before it has given, so that of two placements of a choice the larger one is in force.

    Attributes:
        client: the client's address at the public ROUTER socket.
        params: without anything left open, and without the grammar.
        received_at, tokenized_at, queue_deadline, deadline: Unix seconds.
        bad_words: token ids (int32 bytes) of each.
        client_retry: the client has sent the request before (Generate.resent).
        frontend_retry: the frontend has sent it to a scheduler before, perhaps not to this one.
        tenant: name of its tenant, with its user where there is one; "" without tenants.
        weight: the tenant's share, in proportion to the weights of the others.
        cache_salt: what cached prefixes are kept apart by; "" for the common ones.
        trace: place of the request in its trace; None: it is not traced.
        progress: the choices that go on, or start again, of a request that a scheduler had; the
            others have ended, or are open there. Empty for a request that begins.
        num_losses: number of replicas that were lost while they had it; it may be the reason.
        placement: number of the placement of these choices.
        since: number of the first placement of their present stay at the replica.
        sender: number of the frontend, as in FrontendRestarted.
        adapter: the adapter that answers; None: the model itself. `cache_salt` has its id, too.
        cache: keep what it computes after its end; None: as long as there is room.
        moves_on: it is to go on at another replica as soon as its prompt is computed.
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
    tenant: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    trace: TraceContext | None = None
    progress: list[ChoiceProgress] = []
    num_losses: int = 0
    placement: int = 0
    since: int = 0
    sender: int = 0
    adapter: AdapterRef | None = None
    cache: CacheHint | None = None
    moves_on: bool = False

    def begun(self) -> "Submit":
        """Return the request as it began, with the number of its placement."""
        return msgspec.structs.replace(self, progress=[], num_losses=0, since=0, sender=0)

    def of_choices(self, indexes: list[int]) -> "Submit":
        """Return the request with these of its choices, from where they are."""
        known = {choice.index: choice for choice in self.progress}
        progress = [known.get(index) or ChoiceProgress(index) for index in indexes]
        return msgspec.structs.replace(self, progress=progress)

    @property
    def indexes(self) -> list[int]:
        """Indexes of the choices that it asks for."""
        named = [choice.index for choice in self.progress]
        return named or list(range(self.params.n))

    @property
    def stay(self) -> range:
        """Numbers of the placements of the request's present stay at the replica."""
        return range(self.since, self.placement + 1)


# Who aborts a request.
CLIENT, CLIENT_LOST, SERVER_STOPPING = "client", "client_lost", "server_stopping"


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Abort one request of a client, or all of them if the id is empty.

    Attributes:
        by: CLIENT if the client asked for it, CLIENT_LOST if it is gone or was disconnected.
        sender: as in Submit.
    """

    client: bytes
    request_id: str
    by: str = CLIENT
    sender: int = 0


class StopFound(msgspec.Struct, tag="stop_found", array_like=True, frozen=True):
    """The detokenizer found a stop string in these requests."""

    seqs: list[int]


class DetokReady(msgspec.Struct, tag="detok", array_like=True, frozen=True):
    """A new detokenizer without any text; messages for another session are stale."""

    session: int


class EndsDelivered(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The frontend has received the ends of choices.

    Attributes:
        placements: of each end, by the scheduler's numbers. One of an earlier placement does not
            count: its client has asked for the choice again since, and may have ignored it.
        session: the detokenizer's session in which they were sent, as in DetokReady. What belongs
            to an earlier one does not count: the ends were sent again.
        sender: number of the frontend, as in FrontendRestarted.
    """

    placements: dict[int, int]
    session: int = 0
    sender: int = 0


class FrontendRestarted(msgspec.Struct, tag="frontend_restarted", array_like=True, frozen=True):
    """The frontend was restarted; ends that its predecessor had received may be lost.

    Attributes:
        sender: number of the frontend, larger than that of each one before it. What an earlier one
            has sent, and is read later, does not count.
        wants_names: answer with KnownRequests.
    """

    sender: int = 0
    wants_names: bool = False


class PinAdapters(msgspec.Struct, tag="pin_adapters", array_like=True, frozen=True):
    """Have the worker load these adapters, and keep them in their places without requests.

    The message takes the place of earlier ones.

    Attributes:
        adapters: fewer than the worker has places.
    """

    adapters: list[AdapterRef]


class DropAdapters(msgspec.Struct, tag="drop_adapters", array_like=True, frozen=True):
    """Have the worker free the memory of adapters that have no name any more.

    Attributes:
        ids: as in AdapterRef. One that a request needs is kept until the request's end.
    """

    ids: list[str]


class LinkRestored(msgspec.Struct, tag="link_restored", array_like=True, frozen=True):
    """A link between frontend and replica had broken; what was on it may be lost.

    The detokenizer begins a new session, so that every stream and every end is sent again. It is
    the first message to a replica on another machine.

    Attributes:
        version: the frontend's version of quadriga, without which a scheduler refuses the link.
    """

    version: str = ""


class CacheRelease(msgspec.Struct, array_like=True, frozen=True):
    """Release the pins of a tenant. key: that of CacheHint; None: all of the tenant."""

    tenant: str
    key: str | None


class InfoRequest(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """A client's GetInfo on its way through the processes, each of which adds its values.

    Attributes:
        flush_cache: drop the cached prefixes that no request uses first.
        release: release pins first.
    """

    client: bytes
    request_id: str
    values: InfoValues
    flush_cache: bool = False
    release: CacheRelease | None = None


class ProgressRequest(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """A client's GetProgress on its way to the scheduler.

    Attributes:
        preparing: those of `request_ids` that the frontend has not submitted yet.
    """

    client: bytes
    request_id: str
    request_ids: list[str]
    preparing: list[str] = []


class WatchSteps(msgspec.Struct, tag="watch_steps", array_like=True, frozen=True):
    """Make the live feed for some seconds from now on; 0: no longer.

    Attributes:
        is_new: there is a new viewer, and the next message must be a whole one.
        replica: number of the replica that makes the feed.
    """

    seconds: float
    is_new: bool = False
    replica: int = 0


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Finish the open requests, then answer Drained; no request follows."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Exit: the clients have everything, and the frontend exits."""


class Recall(msgspec.Struct, tag="recall", array_like=True, frozen=True):
    """Give every open request back, to go on at another replica; answer HandedBack.

    Attributes:
        number: of this recall, for its answer. It is larger than the number of its frontend.
    """

    number: int


class Withdraw(msgspec.Struct, tag="withdraw", array_like=True, frozen=True):
    """Drop choices that another replica owns; answer Withdrawn.

    Attributes:
        seqs: the scheduler's numbers of the choices.
    """

    seqs: list[int]


class LoadAhead(msgspec.Struct, tag="load_ahead", array_like=True, frozen=True):
    """Load the KV pages of the beginning of a prompt that another replica computes at present.

    They are cached pages then: nothing holds them, and no request need follow.

    Attributes:
        token_ids: the beginning, int32 bytes.
        cache_salt: as in Submit.
    """

    token_ids: bytes
    cache_salt: str = ""


class AbortAll(msgspec.Struct, tag="abort_all", array_like=True, frozen=True):
    """Abort every request now, for this reason."""

    reason: str


SchedulerMessage = (
    Submit
    | AbortRequest
    | StopFound
    | DetokReady
    | EndsDelivered
    | FrontendRestarted
    | InfoRequest
    | ProgressRequest
    | WatchSteps
    | Drain
    | Shutdown
    | AbortAll
    | Recall
    | LinkRestored
    | Withdraw
    | LoadAhead
    | DropAdapters
    | PinAdapters
)
