"""scheduler_proc -> detok_proc, and on to tokenizer_proc.

What detok_proc sends on is two frames: the client's address, and the public message as it will be
sent, already encoded. An empty address with an empty message says that nothing follows.
"""

import msgspec

from quadriga.messages.logprobs import LogprobBlock, SampledLogprobs
from quadriga.messages.public import ErrorInfo, Info


class ToldPrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt whose log-probabilities a client asked for. token_ids: int32 bytes, all of it;
    width: of the likeliest; blocks: for all tokens but the first, in order."""

    token_ids: bytes
    width: int
    blocks: list[LogprobBlock]


class OpenText(msgspec.Struct, array_like=True, frozen=True):
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
    prompt: ToldPrompt | None = None


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
    index: int = 0


class StepOutput(msgspec.Struct, tag="output", array_like=True, frozen=True):
    """What one step gave: `opened` first, then token_ids[i] for seqs[i], then `closed`.

    seqs: int64s would do; they are plain ints because a server may live long.
    time: the end of the step in Unix seconds, the time of each of its tokens.
    logprobs: of those tokens whose clients asked for them; its rows are places in `seqs`.
    """

    time: float
    opened: list[OpenText]
    seqs: list[int]
    token_ids: bytes
    closed: list[CloseText]
    logprobs: SampledLogprobs | None = None


class InfoReply(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """An Info on its way to its client."""

    client: bytes
    info: Info


class StopDetok(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Nothing follows; pass the end on to the tokenizer and leave."""


DetokMessage = StepOutput | InfoReply | StopDetok
