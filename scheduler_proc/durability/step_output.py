"""What the scheduler tells the detokenizer: tokens, and which requests begin and end."""

from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from quadriga.wire.messages.arrays import pack_ids, unpack_ids
from quadriga.wire.messages.logprobs import LogprobBlock, SampledLogprobs
from quadriga.wire.messages.to_detok import (
    PromptLogprobsData,
    StepOutput,
    StreamEnd,
    StreamReplay,
    StreamStart,
)
from scheduler_proc.state.request import Request


class Sender(Protocol):
    """Where messages go: a socket, or a list in a test."""

    def send(self, message: msgspec.Struct) -> None: ...


class StepOutputBuilder:
    """What one round of the scheduler has for the detokenizer."""

    __slots__ = ("closed", "logprobs", "opened", "replayed", "seqs", "time", "tokens")

    def __init__(self) -> None:
        self.time = 0.0
        self.opened: list[StreamStart] = []
        self.seqs: list[int] = []
        self.tokens: list[int] = []
        self.closed: list[StreamEnd] = []
        self.logprobs: SampledLogprobs | None = None
        self.replayed: list[StreamReplay] = []

    @property
    def is_empty(self) -> bool:
        return not (self.seqs or self.closed or self.replayed)

    def take_logprobs(self, told: SampledLogprobs, requests: list[Request]) -> Iterator[Request]:
        """Of the tokens of the step that these requests ran, once the tokens are taken in. Who of
        them was told something."""
        places = {seq: place for place, seq in enumerate(self.seqs)}
        rows = [places.get(requests[row].seq, -1) for row in unpack_ids(told.rows)]
        self.logprobs = SampledLogprobs(pack_ids(rows), told.block)
        for index, row in enumerate(unpack_ids(told.rows)):
            if rows[index] >= 0:
                requests[row].told.append(_entry(told.block, index))
                yield requests[row]

    def to_message(self, clock: Callable[[], float], waiting: int, session: int) -> StepOutput:
        """waiting: requests in the waiting queue. session: of the detokenizer."""
        return StepOutput(
            time=self.time or clock(),
            opened=self.opened,
            seqs=self.seqs,
            token_ids=pack_ids(self.tokens),
            closed=self.closed,
            logprobs=self.logprobs,
            waiting=waiting,
            session=session,
            replayed=self.replayed,
        )


def _entry(block: LogprobBlock, index: int) -> LogprobBlock:
    """Of one of its tokens."""
    one = slice(4 * index, 4 * index + 4)
    top = slice(4 * index * block.width, 4 * (index + 1) * block.width)
    return LogprobBlock(block.values[one], block.width, block.top_ids[top], block.top_values[top])


def open_text(request: Request) -> StreamStart:
    """What the detokenizer must know of a request. The prompt is told once its first token is."""
    params = request.params
    return StreamStart(
        seq=request.seq,
        client=request.client,
        request_id=request.request_id,
        stream=request.stream,
        skip_special_tokens=params.skip_special_tokens,
        stop_strings=params.stop_strings,
        index=request.index,
        stop_regexes=params.stop_regexes,
        keeps_stop=params.keeps_stop,
        min_new_tokens=params.min_new_tokens,
        logprobs=params.logprobs,
        prompt=_told_prompt(request),
    )


def _told_prompt(request: Request) -> PromptLogprobsData | None:
    width = request.params.prompt_logprobs
    if width is None or not request.first_token:
        return None
    ids = pack_ids(request.tokens[: request.num_prompt])
    return PromptLogprobsData(ids, width, list(request.prompt_logprobs))


def close_text(request: Request) -> StreamEnd:
    """The request has ended; its reason is set."""
    return StreamEnd(
        seq=request.seq,
        client=request.client,
        request_id=request.request_id,
        finish_reason=request.finish_reason,
        matched_stop=request.matched_stop,
        error=request.error,
        prompt_tokens=request.num_prompt,
        cached_tokens=request.cached_tokens,
        received=request.received,
        tokenized=request.tokenized,
        admitted=request.admitted,
        first_token=request.first_token,
        index=request.index,
    )
