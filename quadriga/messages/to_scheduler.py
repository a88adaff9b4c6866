"""tokenizer_proc, detok_proc -> scheduler_proc."""

import msgspec

from quadriga.messages.grammar import GrammarForm
from quadriga.messages.public import InfoValues
from quadriga.sampling import SamplingParams


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """A validated, tokenised request. client: the ROUTER's address of the one who asked.

    params: what the client left open is filled in. bad_words: token ids (int32 bytes) of each.
    queue_deadline, deadline: Unix seconds; None where there is none. grammar: that of the params,
    which do not have it any more.
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
    bad_words: list[bytes] = []
    grammar: GrammarForm | None = None


class AbortRequest(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End one request of a client, or with an empty id all of them."""

    client: bytes
    request_id: str


class StopFound(msgspec.Struct, tag="stop_found", array_like=True, frozen=True):
    """The detokenizer met a stop string in these requests."""

    seqs: list[int]


class Inspect(msgspec.Struct, tag="inspect", array_like=True, frozen=True):
    """A client's GetInfo, on its way round the ring: each process adds what it knows.

    flush_cache: forget the cached prefixes that nobody uses before that.
    """

    client: bytes
    request_id: str
    values: InfoValues
    flush_cache: bool = False


class Drain(msgspec.Struct, tag="drain", array_like=True, frozen=True):
    """Nothing new will come: finish what is there, then stop and pass Stop on."""


class AbortAll(msgspec.Struct, tag="abort_all", array_like=True, frozen=True):
    """End every request now, for this reason."""

    reason: str


SchedulerMessage = Submit | AbortRequest | StopFound | Inspect | Drain | AbortAll
