"""scheduler_proc -> detok_proc, and on to tokenizer_proc.

detok_proc sends three frames on: the client's address, the encoded public message, and a Delivered.
A message for the frontend itself has no address; three empty frames are Drained, and a third frame
alone is a StepNews, in front of the texts of its step.
"""

import msgspec

from quadriga.wire.adapter import AdapterRef
from quadriga.wire.client import ErrorInfo, Info, ProgressAnswer
from quadriga.wire.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.trace import RequestTrace, Span

# What the frontend has to know of a replica to choose the next one for a request, and to move a
# request to another replica with the tokens that its client has.


class HeldChoice(msgspec.Struct, array_like=True, frozen=True):
    """An open choice of a request.

    Attributes:
        seq: the scheduler's number.
        index: index of the choice.
        token_ids: generated tokens before those of this message, int32 bytes.
        first_token_at: Unix seconds; 0.0 without a token.
        placement: as in Submit.
    """

    seq: int
    client: bytes
    request_id: str
    index: int
    token_ids: bytes = b""
    first_token_at: float = 0.0
    placement: int = 0


class EndedRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request, the ends of some of whose choices the scheduler can replay.

    Attributes:
        placements: the placement of each of these choices, by index, as in Submit.
    """

    client: bytes
    request_id: str
    placements: dict[int, int] = {}


class MovableChoice(msgspec.Struct, array_like=True, frozen=True):
    """An open choice whose prompt is computed, and whose KV pages another replica can load.

    Attributes:
        seq: the scheduler's number.
        admitted_at: Unix seconds.
        cached_tokens: prompt tokens that came from the prefix cache.
        logprobs: of its generated tokens up to this step, a block each, where its client wants
            them.
        prompt_logprobs: of its prompt, where its client wants them.
        spans: what its trace has so far, up to its first token; none where it is not traced.
    """

    seq: int
    admitted_at: float = 0.0
    cached_tokens: int = 0
    logprobs: list[LogprobBlock] = []
    prompt_logprobs: list[LogprobBlock] = []
    spans: list[Span] = []


class StoredPrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt under way, of which other replicas can load the first KV pages by now.

    Attributes:
        client, request_id, index: of the choice.
        num_tokens: on the pages that can be loaded.
    """

    client: bytes
    request_id: str
    index: int
    num_tokens: int


class PromptWork(msgspec.Struct, array_like=True, frozen=True):
    """What a scheduler has measured of prompts, and of the rows beside them, since its start.

    Attributes:
        seconds: what steps have taken longer because of their prompts.
        num_tokens: prompt tokens that were computed in this time.
        page_s: seconds in which a page of another replica is loaded, in the fastest load; 0.0
            before any.
        num_rows: decode rows of all steps.
        rows_s: the sum over these rows of what their step would have taken without prompts.
        shortest_s: seconds of the shortest kind of step.
    """

    seconds: float = 0.0
    num_tokens: int = 0
    page_s: float = 0.0
    num_rows: int = 0
    rows_s: float = 0.0
    shortest_s: float = 0.0


class ReplicaNews(msgspec.Struct, array_like=True, frozen=True):
    """What the scheduler adds to a step for the frontend.

    Attributes:
        added: joined hashes of blocks that the prefix cache has gained, as in
            quadriga/server/prefix_blocks.py.
        evicted: joined hashes of blocks that it has lost after that.
        num_available: pages that can be allocated.
        restates: nothing that was known before holds any more: `added` has all blocks, `held`
            all open choices, `ended` all ended requests that can be replayed.
        held: choices whose tokens the frontend may not know.
        frontend: number of the newest frontend that has announced itself, as in FrontendRestarted.
        movable: choices that can go on at another replica from now on; of a replica that computes
            prompts for others.
        work: with prompts.
        hands_over: it is such a replica.
        stored: prompts that it computes, of which more can be loaded than was said before.
    """

    added: bytes = b""
    evicted: bytes = b""
    num_available: int = 0
    restates: bool = False
    held: list[HeldChoice] = []
    ended: list[EndedRequest] = []
    frontend: int = 0
    movable: list[MovableChoice] = []
    work: PromptWork = PromptWork()
    hands_over: bool = False
    stored: list[StoredPrompt] = []


# Of the prompt that a text continues, the detokenizer gets as many ids.
PROMPT_END_TOKENS = 16


class PromptLogprobsData(msgspec.Struct, array_like=True, frozen=True):
    """A prompt with its log-probabilities.

    Attributes:
        token_ids: the whole prompt, int32 bytes.
        width: number of likeliest tokens per position.
        blocks: log-probabilities of all tokens but the first, in order.
    """

    token_ids: bytes
    width: int
    blocks: list[LogprobBlock]


class StreamStart(msgspec.Struct, array_like=True, frozen=True):
    """Start of a stream: what the detokenizer needs of a request that has its first token.

    Attributes:
        index: index of the choice.
        keeps_stop: the stop string stays in the text.
        min_new_tokens: number of tokens that cannot stop the text.
        logprobs: number of tokens per position with logprobs beside the token itself: the
            likeliest ones, then chosen ones; None: no logprobs.
        prompt: the prompt, if its log-probabilities were requested.
        text_lengths: chunks have the text lengths of their tokens.
        prompt_end: the last PROMPT_END_TOKENS ids of the prompt that the text continues, int32
            bytes; empty for a text of its own.
        placement: as in Submit.
        given_ids: tokens with which the answer begins, and which no step samples, int32 bytes.
    """

    seq: int
    client: bytes
    request_id: str
    stream: bool
    skip_special_tokens: bool
    stop_strings: list[str]
    index: int = 0
    stop_regexes: list[str] = []
    keeps_stop: bool = False
    min_new_tokens: int = 0
    logprobs: int | None = None
    prompt: PromptLogprobsData | None = None
    text_lengths: bool = False
    prompt_end: bytes = b""
    placement: int = 0
    given_ids: bytes = b""


class StreamEnd(msgspec.Struct, array_like=True, frozen=True):
    """End of a stream; the detokenizer adds times and the number of completion tokens.

    Attributes:
        trace: spans of the request up to its end; None: it is not traced.
        placement: as in Submit.
        vector: float32 bytes of the answer; None: the answer is tokens, or there is none.
    """

    seq: int
    client: bytes
    request_id: str
    finish_reason: str
    matched_stop: int | None
    error: ErrorInfo | None
    prompt_tokens: int
    cached_tokens: int
    received_at: float
    tokenized_at: float
    admitted_at: float
    first_token_at: float
    index: int = 0
    trace: RequestTrace | None = None
    placement: int = 0
    vector: bytes | None = None


class StreamReplay(msgspec.Struct, array_like=True, frozen=True):
    """Everything of a request up to now, for a new detokenizer, or a client that missed messages.

    Attributes:
        token_ids: generated tokens, int32 bytes, with those that were given.
        logprobs: log-probabilities of those that were sampled, in order, if requested.
        closing: end of the request; None: it continues.
    """

    opening: StreamStart
    token_ids: bytes
    logprobs: list[LogprobBlock]
    closing: StreamEnd | None


class StepOutput(msgspec.Struct, tag="output", array_like=True, frozen=True):
    """Output of one step. Its parts apply in this order: replayed, opened, token_ids, closed.

    Attributes:
        time: end of the step, in Unix seconds; the time of each of its tokens.
        seqs: number of the request of each token.
        token_ids: int32 bytes, one per item of `seqs`.
        logprobs: log-probabilities that were requested; rows are indices into `seqs`.
        waiting: number of requests in the waiting queue.
        session: session of the DetokReady; a message of another session is stale.
        wait_s: estimated seconds that one more request would wait, if the queue is nearly full.
        news: what the frontend has to know of the replica; None where that is nothing new.
    """

    time: float
    opened: list[StreamStart]
    seqs: list[int]
    token_ids: bytes
    closed: list[StreamEnd]
    logprobs: SampledLogprobs | None = None
    waiting: int = 0
    session: int = 0
    replayed: list[StreamReplay] = []
    wait_s: float | None = None
    news: ReplicaNews | None = None


class InfoReply(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """An Info for a client."""

    client: bytes
    info: Info


class ProgressReply(msgspec.Struct, tag="progress", array_like=True, frozen=True):
    """A ProgressAnswer for a client."""

    client: bytes
    progress: ProgressAnswer


class LiveFrame(msgspec.Struct, tag="live", array_like=True, frozen=True):
    """An encoded LiveStep on its way to the frontend, which knows the viewers."""

    frame: bytes


class SchedulerRestarted(msgspec.Struct, tag="scheduler_restarted", array_like=True, frozen=True):
    """Forget every text, and answer with a DetokReady of a new session.

    It follows the start of a scheduler, or a broken link to the frontend.
    """


class Drained(msgspec.Struct, tag="drained", array_like=True, frozen=True):
    """Every request has ended; the frontend learns that it has received all ends."""


class HandedBack(msgspec.Struct, tag="handed_back", array_like=True, frozen=True):
    """The scheduler has given its requests back, and nothing of them follows.

    The detokenizer forgets their texts, and sends this on to the frontend, as an empty address,
    this, and an empty frame. Everything of these requests has gone out before.

    Attributes:
        number: of the Recall that it answers.
        seqs: numbers of the requests.
    """

    number: int
    seqs: list[int] = []


class Withdrawn(msgspec.Struct, tag="withdrawn", array_like=True, frozen=True):
    """The scheduler has dropped choices that another replica owns, and nothing of them follows.

    The detokenizer forgets their texts, and sends this on to the frontend as it does HandedBack.

    Attributes:
        seqs: numbers of the choices.
    """

    seqs: list[int]


class KnownRequest(msgspec.Struct, array_like=True, frozen=True):
    """A request that is open, or whose end can be replayed.

    Attributes:
        adapter: what an open request runs with; None: none, or the request has ended.
    """

    client: bytes
    request_id: str
    adapter: AdapterRef | None = None


class KnownRequests(msgspec.Struct, tag="known", array_like=True, frozen=True):
    """What the scheduler knows of requests, for a new frontend, to which it is passed on."""

    requests: list[KnownRequest]


class ForgetStreams(msgspec.Struct, tag="forget", array_like=True, frozen=True):
    """Drop the texts of these choices until they are replayed: their replays take several steps.

    Attributes:
        seqs: numbers of the choices.
    """

    seqs: list[int]


class StopDetok(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Exit; no message follows."""


class Delivered(msgspec.Struct, array_like=True, frozen=True):
    """The facts that the frontend needs of a message that it passes on without decoding.

    Attributes:
        ended: ids of the client's requests that end, once per choice that ends.
        waiting: number of requests in the waiting queue, if it is known.
        settled: placements of the choices of any client whose ends have been delivered with this
            message or earlier, by the scheduler's numbers.
        inspected: the message answers an InfoRequest or a ProgressRequest.
        generated: number of tokens of each choice in `ended`.
        wait_s: as in StepOutput.
        traces: of choices in `ended` that are traced.
        lost: the message is empty. `ended` are choices that were aborted because their client was
            lost: if it is back, and has sent the requests again, these ends are not theirs.
        indexes: indexes of the choices in `ended`.
        placements: their placements, as in Submit.
        session: of `settled`, as in DetokReady.
    """

    ended: list[str] = []
    waiting: int | None = None
    settled: dict[int, int] = {}
    inspected: bool = False
    generated: list[int] = []
    wait_s: float | None = None
    traces: list[RequestTrace] = []
    lost: bool = False
    indexes: list[int] = []
    placements: list[int] = []
    session: int = 0


class StepNews(msgspec.Struct, array_like=True, frozen=True):
    """The tokens of a step, and its replica's news.

    A replica whose requests can move to another one sends it with each step; the only replica of a
    server sends it to say what it has, to a new frontend or after a new detokenizer.

    The detokenizer sends it to the frontend in front of the step's texts, as an empty address, an
    empty message, and this: the frontend has to know every token whose text it passes on, so that
    the request can move to another replica with it.

    Attributes:
        started: choices that have their first token with this step.
        seqs: number of the request of each token.
        token_ids: int32 bytes, one per item of `seqs`.
        logprobs: of these tokens, of a replica that hands requests over.
    """

    news: ReplicaNews
    started: list[HeldChoice]
    seqs: list[int]
    token_ids: bytes
    logprobs: SampledLogprobs | None = None


DetokMessage = (
    StepOutput
    | InfoReply
    | ProgressReply
    | LiveFrame
    | SchedulerRestarted
    | Drained
    | StopDetok
    | HandedBack
    | Withdrawn
    | ForgetStreams
    | KnownRequests
)
