"""What the scheduler tells the detokenizer: tokens, and which requests begin and end."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from quadriga.messages.ids import pack_ids
from quadriga.messages.to_detok import CloseText, OpenText, StepOutput
from scheduler_proc.request import Request


class Link(Protocol):
    """Where messages go: a socket, or a list in a test."""

    def send(self, message: msgspec.Struct) -> None: ...


class RoundOutput:
    """What one round of the scheduler has for the detokenizer."""

    __slots__ = ("closed", "opened", "seqs", "time", "tokens")

    def __init__(self) -> None:
        self.time = 0.0
        self.opened: list[OpenText] = []
        self.seqs: list[int] = []
        self.tokens: list[int] = []
        self.closed: list[CloseText] = []

    @property
    def is_empty(self) -> bool:
        return not (self.seqs or self.closed)

    def to_message(self, clock: Callable[[], float]) -> StepOutput:
        time = self.time or clock()
        return StepOutput(time, self.opened, self.seqs, pack_ids(self.tokens), self.closed)


def open_text(request: Request) -> OpenText:
    """The request gives its first token."""
    return OpenText(
        seq=request.seq,
        client=request.client,
        request_id=request.request_id,
        stream=request.stream,
        skip_special_tokens=request.params.skip_special_tokens,
        stop_strings=request.params.stop_strings,
    )


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
    )
