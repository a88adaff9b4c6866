"""scheduler_proc -> detok_proc, and on to tokenizer_proc.

What detok_proc sends on is three frames: the client's address, the public message as it will be
sent, already encoded, and a Delivered. All three are empty where nothing follows.
"""

import msgspec

from quadriga.wire.messages.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.messages.public import ErrorInfo, Info


class PromptLogprobsData(msgspec.Struct, array_like=True, frozen=True):
    """A prompt whose log-probabilities a client asked for. token_ids: int32 bytes, all of it;
    width: of the likeliest; blocks: for all tokens but the first, in order."""

    token_ids: bytes
    width: int
    blocks: list[LogprobBlock]


class StreamStart(msgspec.Struct, array_like=True, frozen=True):
    """A request gave its first token: what the detokenizer must know of it from now on.

    index: of the choice, where several were asked for. keeps_stop: what stops the text is its end.
    min_new_tokens: so many tokens cannot stop the text. logprobs: how many of the likeliest tokens
    its client wants to know; None: not even the token's own log-probability.
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


class StreamEnd(msgspec.Struct, array_like=True, frozen=True):
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
    received_at: float
    tokenized_at: float
    admitted_at: float
    first_token_at: float
    index: int = 0


class StreamReplay(msgspec.Struct, array_like=True, frozen=True):
    """All of a request up to now, for a detokenizer that has not seen it, or a client that has
    missed some of it. token_ids: what was generated; logprobs: of these tokens, in order, where
    they are told; closing: None where it goes on.
    """

    opening: StreamStart
    token_ids: bytes
    logprobs: list[LogprobBlock]
    closing: StreamEnd | None


class StepOutput(msgspec.Struct, tag="output", array_like=True, frozen=True):
    """What one step gave: `replayed` and `opened` first, then token_ids[i] for seqs[i], then
    `closed`.

    seqs: int64s would do; they are plain ints because a server may live long.
    time: the end of the step in Unix seconds, the time of each of its tokens.
    logprobs: of those tokens whose clients asked for them; its rows are places in `seqs`.
    waiting: requests in the waiting queue. session: that of the DetokReady; what belongs to another
    one is stale.
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


class InfoReply(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """An Info on its way to its client."""

    client: bytes
    info: Info


class SchedulerRestarted(msgspec.Struct, tag="scheduler", array_like=True, frozen=True):
    """Forget every text, and answer with a DetokReady of a new session."""


class Drained(msgspec.Struct, tag="all_told", array_like=True, frozen=True):
    """Every request has ended, and the front door is to know that it has heard of all."""


class StopDetok(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Nothing follows: leave."""


class Delivered(msgspec.Struct, array_like=True, frozen=True):
    """What the front door must know of a message that it hands out unread.

    ended: ids of the client's requests that it ends, each as often as choices of it end. waiting:
    requests in the waiting queue, where the message tells. settled: the scheduler's numbers of
    those, of any client, whose ends have come with this message or with one before it. inspected:
    the message is the answer to an Inspect.
    """

    ended: list[str] = []
    waiting: int | None = None
    settled: list[int] = []
    inspected: bool = False


DetokMessage = StepOutput | InfoReply | SchedulerRestarted | Drained | StopDetok
