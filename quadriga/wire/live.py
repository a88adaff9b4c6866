"""The live feed: what the scheduler does, one message a step, for a client that watches.

It has numbers and names of requests, never their texts or tokens.
"""

import enum

import msgspec

# Bounds of one message: further rows and requests are counted, not listed.
MAX_LIVE_ROWS = 256
MAX_LIVE_WAITING = 256
MAX_LIVE_EVENTS = 256
MAX_LIVE_TREE_NODES = 256
# A subscription ends after this time unless it is renewed.
MAX_WATCH_S = 30.0


class RowKind(enum.IntEnum):
    """What a row of a step computes.

    DECODE: the tokens after the last one. PREFILL: the rest of a prompt. CHUNK: a part of a prompt.
    RECOMPUTE: tokens that were computed before a retraction, or before a new worker.
    """

    DECODE = 0
    PREFILL = 1
    CHUNK = 2
    RECOMPUTE = 3


class SkipReason(str, enum.Enum):
    """Why a request has no row in a step.

    Attributes:
        WORKER: the worker is not ready.
        GRAMMAR: the worker compiles its grammar.
        ADAPTER: its adapter is being loaded, or others have all places.
        SLOTS: no slot is free.
        PAGES: no KV page is free.
        BUDGET: the step computes as many prompt tokens as it may.
        TURN: the step decodes only, or computes prompts only.
        WIDTH: the step has as many decode rows as it may.
        PRIORITY: requests of a larger priority go first.
        FAIRNESS: it is the turn of other clients or tenants.
        POLICY: the policy prefers requests that arrived later.
        QUARANTINE: a request that may crash the worker runs alone.
        RETRACTED: it has lost its pages, and its last step is not answered yet.
        ENDING: its last step is in flight.
    """

    WORKER = "worker"
    GRAMMAR = "grammar"
    ADAPTER = "adapter"
    SLOTS = "slots"
    PAGES = "pages"
    BUDGET = "budget"
    TURN = "turn"
    WIDTH = "width"
    PRIORITY = "priority"
    FAIRNESS = "fairness"
    POLICY = "policy"
    QUARANTINE = "quarantine"
    RETRACTED = "retracted"
    ENDING = "ending"


class EventKind(str, enum.Enum):
    """What happened to a request. REFUSED: it has ended with an error before it was admitted."""

    ADMITTED = "admitted"
    RETRACTED = "retracted"
    FINISHED = "finished"
    REFUSED = "refused"


class LiveEvent(msgspec.Struct, array_like=True, frozen=True):
    """An event of a request.

    Attributes:
        detail: cached tokens of an admission, finish reason or error code of an end.
    """

    kind: EventKind
    seq: int
    detail: str = ""


class LiveRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request in the feed. `seq` is its number at the scheduler, which rows and events name.

    Attributes:
        client: the short form of its client's address.
        index: index of the choice.
        cached_tokens: prompt tokens that came from the prefix cache.
        max_total_tokens: prompt and completion at their longest.
        received_at, admitted_at, first_token_at: Unix seconds; 0.0: not yet.
        waited_for: what it waited for before its admission.
    """

    seq: int
    request_id: str
    client: str
    tenant: str
    index: int
    priority: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_computed_tokens: int
    cached_tokens: int
    max_total_tokens: int
    num_retractions: int
    received_at: float
    admitted_at: float
    first_token_at: float
    waited_for: list[str] = []


class LiveGauges(msgspec.Struct, array_like=True, frozen=True):
    """Gauges and totals of the scheduler at the time of a message."""

    running: int
    waiting: int
    waiting_for_grammar: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_held: int
    steps: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generation_tokens_total: int
    retractions: int


class LiveTree(msgspec.Struct, array_like=True, frozen=True):
    """The prefix tree from its root, chains of pages merged, as far as the bounds reach.

    Attributes:
        parents: place of each node's parent, -1 for a node below the root; parents come first.
        num_pages: pages of each node.
        num_holders: requests that hold these pages: 0 for cached ones, 2 and more for shared ones.
        num_shared_pages: pages in the list that two requests or more hold.
        is_whole: the list has the whole tree.
    """

    parents: list[int]
    num_pages: list[int]
    num_holders: list[int]
    num_shared_pages: int
    is_whole: bool


class LiveStep(msgspec.Struct, tag="live_step", array_like=True, frozen=True):
    """A step that was planned, or, without rows, what happened while none was.

    Attributes:
        number: number of the message; a gap says that messages were dropped.
        step: number of the step; -1 without one.
        time: when it was planned, Unix seconds.
        seqs: request of each row, the decode rows first.
        kinds: kind of each row.
        num_tokens: tokens that each row computes.
        num_hidden_rows: rows that are not listed.
        skipped: the requests without a row, by reason, in the order in which they wait.
        num_hidden_skipped: waiting requests that are not listed.
        requests: requests that are new in the feed or were just admitted; with `is_whole` all.
        is_whole: `requests` has all listed requests, and `tree` is there.
        events: events since the message before.
        ended_steps: steps that ended since then.
        began_at, ended_at: the worker's times of each of them, Unix seconds.
        replica: number of the scheduler's replica.
    """

    number: int
    step: int
    time: float
    seqs: list[int]
    kinds: list[RowKind]
    num_tokens: list[int]
    num_hidden_rows: int
    skipped: dict[SkipReason, list[int]]
    num_hidden_skipped: int
    requests: list[LiveRequest]
    is_whole: bool
    events: list[LiveEvent]
    ended_steps: list[int]
    began_at: list[float]
    ended_at: list[float]
    gauges: LiveGauges
    tree: LiveTree | None = None
    replica: int = 0


class LiveProcess(msgspec.Struct, array_like=True, frozen=True):
    """A process of the server.

    Attributes:
        cpu_seconds: CPU time since its start.
        resident_bytes: resident memory.
        started_at: Unix seconds.
    """

    name: str
    pid: int
    cpu_seconds: float
    resident_bytes: int
    started_at: float


class LiveServer(msgspec.Struct, tag="live_server", array_like=True, frozen=True):
    """The processes of the server, and the frontend's counters; once a second.

    Attributes:
        time: Unix seconds.
        refused: messages that were answered by an error since the frontend's start.
        open_requests: requests that have not ended.
        viewers: clients that watch.
        dropped: messages of the feed that viewers were too slow for.
        num_replicas: number of replicas, of which each has a feed of its own.
    """

    time: float
    processes: list[LiveProcess]
    refused: int
    open_requests: int
    viewers: int
    dropped: int
    num_replicas: int = 1


LiveMessage = LiveStep | LiveServer
