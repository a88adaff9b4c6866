"""One request, from the waiting queue to its end. The scheduler owns every one of them."""

import enum
from array import array
from dataclasses import dataclass, field

from quadriga.messages.ids import unpack_ids
from quadriga.messages.public import ErrorInfo
from quadriga.messages.to_scheduler import Submit
from quadriga.sampling import SamplingParams
from scheduler_proc.prefix_tree import Node


class Status(enum.IntEnum):
    """Where a request stands.

    RETRACTED: pages and slot are to be given back as soon as no step is in flight, then it waits
    again. FINISHED ones may still have steps in flight.
    """

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    RETRACTED = 3
    FINISHED = 4


@dataclass(slots=True, eq=False)
class Request:
    """State of one request.

    tokens: the prompt, then what was generated.
    known: how many tokens there are with those that steps in flight will sample.
    computed: tokens whose KV exists or is planned. A step lets computed catch up with known; the
        step in which it does samples the next token. Prefill, chunk, decode and the way back after
        a retraction are that one rule.
    in_flight: steps planned and not yet answered. Slot and pages are given back only at 0.
    pages: its page table; capacity: tokens that they hold.
    path: the nodes of the prefix tree that it uses, one for each of its first pages.
    node: where it was found in the tree while it waited.
    """

    seq: int
    client: bytes
    request_id: str
    tokens: "array[int]"
    num_prompt: int
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
    known: int = 0
    most_known: int = 0
    computed: int = 0
    in_flight: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    capacity: int = 0
    path: list[Node] = field(default_factory=list)
    node: Node | None = None
    cached_tokens: int = 0
    admitted: float = 0.0
    first_token: float = 0.0
    finish_reason: str = ""
    matched_stop: int | None = None
    error: ErrorInfo | None = None

    @classmethod
    def from_submit(cls, seq: int, message: Submit, eos_ids: frozenset[int]) -> "Request":
        params = message.params
        tokens = unpack_ids(message.prompt_ids)
        assert params.max_new_tokens is not None, "the front door fills it in"
        stop_ids = frozenset(params.stop_token_ids)
        return cls(
            seq=seq,
            client=message.client,
            request_id=message.request_id,
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            max_new_tokens=params.max_new_tokens,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | eos_ids,
            stream=message.stream,
            received=message.received,
            tokenized=message.tokenized,
            priority=message.priority,
            queue_deadline=message.queue_deadline,
            deadline=message.deadline,
            known=len(tokens),
            most_known=len(tokens) + params.max_new_tokens,
        )

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def to_compute(self) -> int:
        """Tokens that are known and not yet computed."""
        return self.known - self.computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def still_to_sample(self) -> int:
        """Tokens that further steps may sample, those in flight not counted. At 0 no further step
        is needed: what is in flight samples the last possible token."""
        return self.most_known - self.known


def progress(request: Request) -> tuple[int, int]:
    """By this order requests give way where pages are short: first who has generated least."""
    return request.num_generated, -request.num_prompt


def worth(request: Request) -> tuple[int, int, int]:
    """The same where priorities count."""
    return request.priority, request.num_generated, -request.num_prompt
