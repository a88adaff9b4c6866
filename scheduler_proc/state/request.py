"""One request, from the waiting queue to its end. The scheduler owns every one of them."""

import enum
from array import array
from dataclasses import dataclass, field

import msgspec

from quadriga.sampling.params import SamplingParams
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.grammar import GrammarForm
from quadriga.wire.messages.logprobs import LogprobBlock
from quadriga.wire.messages.public import ErrorInfo
from quadriga.wire.messages.to_scheduler import Submit
from quadriga.wire.messages.worker import SlotSamplingParams
from scheduler_proc.slot_params import choice_params, slot_sampling_params
from scheduler_proc.state.prefix_tree import Node

TOKENS_OF_A_BLOCK = 64
"""Tokens that take as much memory as a block of log-probabilities without its numbers."""


class RequestStatus(enum.IntEnum):
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
    node: where it was found in the tree while it waited; missing: the page below it that was not
        there, if it was looked for.
    index: of the choice, where several were asked for.
    rules: what the worker must know beside temperature, top_k, top_p and seed.
    grammar: what its text must obey.
    prompt_logprobs: those of the prompt that are known so far.
    told: the log-probabilities of its tokens, one block each, where its client wants them.
    deaths: of the worker, in a row, while it computed this; cleared_at: see quarantine.py.
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
    index: int = 0
    rules: SlotSamplingParams | None = None
    grammar: GrammarForm | None = None

    status: RequestStatus = RequestStatus.WAITING
    known: int = 0
    most_known: int = 0
    computed: int = 0
    in_flight: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    capacity: int = 0
    path: list[Node] = field(default_factory=list)
    node: Node | None = None
    missing: bytes = b""
    cached_tokens: int = 0
    admitted: float = 0.0
    first_token: float = 0.0
    finish_reason: str = ""
    matched_stop: int | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: list[LogprobBlock] = field(default_factory=list)
    told: list[LogprobBlock] = field(default_factory=list)
    deaths: int = 0
    cleared_at: int = 0

    @classmethod
    def from_submit(
        cls, seq: int, message: Submit, eos_ids: frozenset[int], index: int = 0
    ) -> "Request":
        params = choice_params(message.params, index)
        tokens = unpack_ids(message.prompt_ids)
        assert params.max_new_tokens is not None, "the front door fills it in"
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= eos_ids
        return cls(
            seq=seq,
            client=message.client,
            request_id=message.request_id,
            tokens=tokens,
            num_prompt=len(tokens),
            params=params,
            max_new_tokens=params.max_new_tokens,
            stop_ids=stop_ids,
            stream=message.stream,
            received=message.received,
            tokenized=message.tokenized,
            priority=message.priority,
            queue_deadline=message.queue_deadline,
            deadline=message.deadline,
            index=index,
            rules=slot_sampling_params(
                params, len(tokens), stop_ids, message.bad_words, message.grammar
            ),
            grammar=message.grammar,
            known=len(tokens),
            most_known=len(tokens) + params.max_new_tokens,
        )

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def lose_worker(self) -> None:
        """The worker died, and with it what was computed and what was in flight."""
        self.status = RequestStatus.WAITING
        self.known = len(self.tokens)
        self.computed = self.in_flight = self.capacity = 0
        self.slot = -1
        self.pages, self.path, self.node = [], [], None
        self.forget_prompt()

    def forget_prompt(self) -> None:
        """It is computed again, and told then if it was not yet."""
        if not self.first_token:
            self.prompt_logprobs.clear()

    def jump(self, count: int) -> None:
        """So many tokens are known beyond the one that was sampled last. A step in flight computes
        them, too, as far as its pages reach, and samples only where it reaches the last of them."""
        if self.in_flight == 0:
            self.known += count
            return
        known = self.known - 1 + count
        self.computed = min(known, self.capacity)
        self.known = known + (self.computed == known)

    @property
    def tells_prompt(self) -> bool:
        """Its client still waits for the log-probabilities of the prompt: all of it is computed."""
        return self.params.prompt_logprobs is not None and not self.first_token

    @property
    def rules_to_go(self) -> SlotSamplingParams | None:
        """The rules for a slot that it enters now: a prompt is told once."""
        if self.rules is None or self.tells_prompt:
            return self.rules
        return msgspec.structs.replace(self.rules, prompt_logprobs=None)

    @property
    def size(self) -> int:
        """Of what is remembered once it has ended, in tokens: log-probabilities take the place of
        many."""
        blocks = [*self.told, *self.prompt_logprobs]
        numbers = sum(len(block.values) + 2 * len(block.top_ids) for block in blocks) // 4
        return len(self.tokens) + numbers + TOKENS_OF_A_BLOCK * len(blocks)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that are known and not yet computed."""
        return self.known - self.computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that further steps may sample, those in flight not counted. At 0 no further step
        is needed: what is in flight samples the last possible token."""
        return self.most_known - self.known


def progress(request: Request) -> tuple[int, int]:
    """By this order requests give way where pages are short: first who has generated least."""
    return request.num_generated, -request.num_prompt


def worth(request: Request) -> tuple[int, int, int]:
    """The same where priorities count."""
    return request.priority, request.num_generated, -request.num_prompt
