"""One request, from the waiting queue to its end. The scheduler owns every one of them."""

import enum
from array import array
from dataclasses import dataclass, field

from quadriga.messages import ErrorInfo, Submit, unpack_ids
from quadriga.sampling import SamplingParams


class Status(enum.IntEnum):
    """Where a request stands. FINISHED ones may still have steps in flight."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Request:
    """State of one request.

    known: prompt tokens, sampled tokens, and those that steps in flight will sample.
    computed: tokens whose KV exists or is scheduled. A step lets computed catch up with known;
        the step in which it does samples the next token. Prefill, chunk and decode are that one
        rule.
    in_flight: steps planned and not yet answered. Slot and pages are given back only at 0.
    """

    seq: int
    client: bytes
    request_id: str
    prompt: "array[int]"
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    stream: bool
    received: float
    tokenized: float
    priority: int = 0
    queue_deadline: float | None = None
    deadline: float | None = None

    status: Status = Status.WAITING
    output: "array[int]" = field(default_factory=lambda: array("i"))
    known: int = 0
    computed: int = 0
    in_flight: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    admitted: float = 0.0
    first_token: float = 0.0
    finish_reason: str = ""
    matched_stop: int | None = None
    error: ErrorInfo | None = None

    @classmethod
    def from_submit(cls, seq: int, message: Submit, eos_ids: frozenset[int]) -> "Request":
        params = message.params
        prompt = unpack_ids(message.prompt_ids)
        assert params.max_new_tokens is not None, "the front door fills it in"
        return cls(
            seq=seq,
            client=message.client,
            request_id=message.request_id,
            prompt=prompt,
            params=params,
            max_new_tokens=params.max_new_tokens,
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else eos_ids),
            stream=message.stream,
            received=message.received,
            tokenized=message.tokenized,
            priority=message.priority,
            queue_deadline=message.queue_deadline,
            deadline=message.deadline,
            known=len(prompt),
        )

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def to_compute(self) -> int:
        """Tokens that the next step of this request computes."""
        return self.known - self.computed

    @property
    def reserved_tokens(self) -> int:
        """Tokens whose KV it may come to hold: the last sampled one is never computed."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def fully_scheduled(self) -> bool:
        """No further step is needed: those in flight sample its last possible token."""
        return self.known >= len(self.prompt) + self.max_new_tokens
