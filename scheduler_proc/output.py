"""What the scheduler tells the detokenizer: tokens, and which requests begin and end."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from quadriga.messages.ids import pack_ids, unpack_ids
from quadriga.messages.logprobs import SampledLogprobs
from quadriga.messages.to_detok import CloseText, OpenText, StepOutput, ToldPrompt
from scheduler_proc.request import Request


class Link(Protocol):
    """Where messages go: a socket, or a list in a test."""

    def send(self, message: msgspec.Struct) -> None: ...


class RoundOutput:
    """What one round of the scheduler has for the detokenizer."""

    __slots__ = ("closed", "logprobs", "opened", "seqs", "time", "tokens")

    def __init__(self) -> None:
        self.time = 0.0
        self.opened: list[OpenText] = []
        self.seqs: list[int] = []
        self.tokens: list[int] = []
        self.closed: list[CloseText] = []
        self.logprobs: SampledLogprobs | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.seqs or self.closed)

    def take_logprobs(self, told: SampledLogprobs, requests: list[Request]) -> None:
        """Of the tokens of the step that these requests ran, once the tokens are taken in."""
        places = {seq: place for place, seq in enumerate(self.seqs)}
        rows = [places.get(requests[row].seq, -1) for row in unpack_ids(told.rows)]
        self.logprobs = SampledLogprobs(pack_ids(rows), told.block)

    def to_message(self, clock: Callable[[], float]) -> StepOutput:
        time = self.time or clock()
        ids = pack_ids(self.tokens)
        return StepOutput(time, self.opened, self.seqs, ids, self.closed, self.logprobs)


def open_text(request: Request) -> OpenText:
    """The request gives its first token."""
    params = request.params
    return OpenText(
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


def _told_prompt(request: Request) -> ToldPrompt | None:
    width = request.params.prompt_logprobs
    if width is None:
        return None
    blocks, request.prompt_logprobs = request.prompt_logprobs, []
    return ToldPrompt(pack_ids(request.tokens[: request.num_prompt]), width, blocks)


def close_text(request: Request) -> CloseText:
    """The request has ended; its reason is set."""
    return CloseText(
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
