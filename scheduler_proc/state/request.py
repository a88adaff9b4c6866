"""The state of one request, from the waiting queue to its end.

With it, the sampling parameters that the worker's slot needs, and the record of how good the
request's speculative tokens were lately.
"""

import enum
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from quadriga.errors import QuadrigaError
from quadriga.sampling.params import LIMITS, MAX_SEED, NEUTRAL, SamplingParams, given
from quadriga.sampling.pooling import LOGPROBS, POOLINGS, Pooling
from quadriga.wire.adapter import AdapterRef
from quadriga.wire.cache import CacheHint
from quadriga.wire.client import ErrorInfo
from quadriga.wire.grammar import GrammarForm
from quadriga.wire.logprobs import LogprobBlock
from quadriga.wire.packing import pack_floats, pack_ids, unpack_ids
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.worker import NO_ADAPTER, NewSlot, SlotSamplingParams, WantedLogprobs
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.span_recorder import SpanRecorder

# How good the guesses of one request were lately.

PRIOR_RIGHT, PRIOR_WRONG = 0.5, 0.25  # what is taken for granted of a new request
MEMORY = 0.8  # weight of earlier guesses at each step with guesses
FIRST_PAUSE, MAX_PAUSE = 16, 256  # steps


@dataclass(slots=True)
class GuessRecord:
    """The recent guesses of a request, and when it may guess again where they were wrong.

    Attributes:
        prior_right, prior_wrong: guesses that are taken for granted.
        memory: weight of earlier guesses at each step with guesses.
        pause: steps without guesses before the next try; doubled while tries fail.
        wait: steps that are left of it.
    """

    prior_right: float = PRIOR_RIGHT
    prior_wrong: float = PRIOR_WRONG
    memory: float = MEMORY
    _right: float = 0.0
    _wrong: float = 0.0
    pause: int = FIRST_PAUSE
    wait: int = 0

    @property
    def rate(self) -> float:
        """The share of guesses that are right, of those whose predecessors were right."""
        right = self.prior_right + self._right
        return right / (right + self.prior_wrong + self._wrong)

    def observe(self, num_guesses: int, num_right: int) -> None:
        """Take in the guesses of a step. Those after the first wrong one say nothing."""
        self._right = self.memory * self._right + num_right
        self._wrong = self.memory * self._wrong + (num_right < num_guesses)
        if num_right:
            self.pause = FIRST_PAUSE

    def fade(self, weight: float) -> None:
        """Trust earlier guesses less after a step without guesses."""
        self._right *= weight
        self._wrong *= weight

    def may_try(self) -> bool:
        """Return whether a request whose guesses do not pay should try one; count the step."""
        if self.wait > 0:
            self.wait -= 1
            return False
        self.wait = self.pause
        self.pause = min(2 * self.pause, MAX_PAUSE)
        return True


MAX_JUMP_GRAMMAR_CHARS = 32_768  # the library takes 28 ms to find 30,000 forced characters


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """SamplingParams of one choice, with a value for everything that a step needs.

    Attributes:
        params: everything else, as the client has sent it.
    """

    params: SamplingParams
    max_new_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float

    @classmethod
    def of_choice(cls, params: SamplingParams, index: int) -> "ResolvedSampling":
        """Return the parameters of choice `index` of `params.n`.

        Each choice has a seed of its own, and only the first one returns prompt logprobs.

        Raises:
            ValueError: max_new_tokens or seed, which the frontend fills in, is missing.
        """
        max_new_tokens, seed = params.max_new_tokens, params.seed
        if max_new_tokens is None or seed is None:
            raise ValueError("max_new_tokens or seed is missing")
        if index and params.prompt_logprobs is not None:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        return cls(
            params=params,
            max_new_tokens=max_new_tokens,
            seed=(seed + index) % (MAX_SEED + 1),
            temperature=given(params.temperature, NEUTRAL.temperature),
            top_k=given(params.top_k, NEUTRAL.top_k),
            top_p=given(params.top_p, NEUTRAL.top_p),
            min_p=given(params.min_p, NEUTRAL.min_p),
            repetition_penalty=given(params.repetition_penalty, NEUTRAL.repetition_penalty),
        )


def slot_sampling_params(
    sampling: ResolvedSampling,
    num_prompt: int,
    stop_ids: Iterable[int],
    bad_words: list[bytes],
    grammar: GrammarForm | None,
) -> SlotSamplingParams | None:
    """Return what a slot needs beyond temperature, top_k, top_p and seed; None for nothing.

    Args:
        sampling: parameters of the choice.
        num_prompt: number of prompt tokens.
        stop_ids: every token id that ends the request.
        bad_words: token ids (int32 bytes) of each.
        grammar: what the text must match.
    """
    params = sampling.params
    masks_stops = params.min_new_tokens > 0 or grammar is not None
    slot_params = SlotSamplingParams(
        num_prompt=0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        bias_ids=pack_ids(params.logit_bias),
        bias=pack_floats(params.logit_bias.values()),
        allowed_ids=pack_ids(params.allowed_token_ids or ()),
        bad_words=bad_words,
        min_new_tokens=params.min_new_tokens,
        stop_ids=pack_ids(sorted(stop_ids)) if masks_stops else b"",
        logprobs=_wanted_logprobs(params),
        prompt_logprobs=params.prompt_logprobs,
        grammar=grammar.key if grammar is not None else b"",
        jumps=grammar is not None and _allows_jump_forward(params, grammar),
    )
    if slot_params == _DEFAULTS:
        return None
    return msgspec.structs.replace(slot_params, num_prompt=num_prompt)


def _wanted_logprobs(params: SamplingParams) -> int | WantedLogprobs | None:
    if not params.logprob_token_ids:
        return params.logprobs
    return WantedLogprobs(params.logprobs or 0, pack_ids(params.logprob_token_ids))


def _allows_jump_forward(params: SamplingParams, grammar: GrammarForm) -> bool:
    """Return whether forced tokens equal the tokens that would be sampled, and need no logprobs.

    A grammar that could force a very long text is left out: looking for it takes long.
    """
    masked = params.logit_bias or params.allowed_token_ids is not None or params.bad_words
    too_long = len(grammar.text) > MAX_JUMP_GRAMMAR_CHARS
    return not (masked or params.num_top_logprobs is not None or too_long)


_DEFAULTS = SlotSamplingParams(num_prompt=0)


# Of a request without a target. It bounds for how long others with a target go first.
DEFAULT_TTFT_TARGET_S = 5.0
TEXT_TARGET_S = 30.0  # of a text that becomes a vector: thousands of them may be before a chat
BACKGROUND_PRIORITY = LIMITS["priority"].minimum
TOKENS_PER_LOGPROB_BLOCK = 64  # a block without its numbers takes as much memory


class RequestStatus(enum.IntEnum):
    """Where a request stands.

    A RETRACTED request gives its pages and its slot back as soon as no step of it is in flight,
    and then waits again. A FINISHED one may still have steps in flight.
    """

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    RETRACTED = 3
    FINISHED = 4


class WaitReason(str, enum.Enum):
    """What kept requests in the waiting queue."""

    GRAMMAR = "grammar"
    ADAPTER = "adapter"
    SLOTS = "slots"
    PAGES = "pages"
    BUDGET = "budget"


class RetractReason(str, enum.Enum):
    """Why a running request lost its slot and pages.

    PAGES: others needed them. PRIORITY: a request of a higher priority came. QUARANTINE: a request
    that may crash the worker runs alone. SUSPENSION: the worker ends, and another model has its
    memory for a time.
    """

    PAGES = "pages"
    PRIORITY = "priority"
    QUARANTINE = "quarantine"
    SUSPENSION = "suspension"


class FinishReason(str, enum.Enum):
    """Why a request ended, as the wire and the journal have it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


ALL_TOKENS = sys.maxsize
# A request that has more tokens at the replica of its prompt found no other one with room.
MAX_TOKENS_BEFORE_MOVE = 8


@dataclass(slots=True, eq=False)
class Request:
    """State of one request, or of one of its choices.

    Attributes:
        tokens: the prompt, then the generated tokens, of which the first may be given.
        index: number of the choice, where several were asked for.
        num_known_tokens: number of tokens, with those that steps in flight will sample.
        num_computed_tokens: tokens whose KV exists or is planned. A step lets it catch up with
            num_known_tokens; the step in which it does samples the next token. Prefill, chunk,
            decode and the return after a retraction follow from this one rule.
        max_total_tokens: prompt and completion at their longest.
        due_at: time at which its first token is due: by its ttft_target, and no later than its
            deadlines; 0.0 where it came here with tokens.
        tenant: name of its tenant, with its user where there is one; "" without tenants.
        weight: share of its tenant, in proportion to the weights of the others.
        cache_salt: what its cached pages are kept apart by.
        placement: as in Submit.
        in_flight: number of steps planned and not yet answered. Slot and pages are released only
            at 0.
        slot: the worker's slot; -1 without one.
        pages: the page table.
        first_page: number of pages at its beginning that no token to come sees, and that the
            request does not hold.
        page_capacity: number of tokens that `pages` hold.
        prefix_path: nodes of the prefix tree that the request holds, one for each of its first
            pages.
        num_shareable: number of its first tokens whose pages others may share: those before the
            first one with keys or values that are not finite.
        prefix_node: deepest node found while the request waited.
        prefix_miss: key of the page below prefix_node that was not in the tree, if looked for.
        may_load: whether pages that are not in the tree may still be loaded before the admission.
        slot_params: what the slot needs beyond temperature, top_k, top_p and seed.
        cached_tokens: prompt tokens that came from the prefix cache at the first admission.
        num_cached_given: given tokens of the answer that came from it then, too.
        prompt_logprobs: logprobs of the prompt, as far as they are computed.
        logprobs: one block for each generated token, where the client wants them.
        waited_for: what the request waited for before its first admission: a compiled grammar, and
            what the last step before it lacked (`WaitReason`).
        num_retractions: number of times that the request lost its pages to others.
        worker_crashes: consecutive worker crashes while the request was in a step.
        cleared_at: number of tokens at which worker_crashes is reset (see planning/quarantine.py).
        guess_record: how good its guessed tokens were; None before the first ones.
        trace: recorder of its spans; None: it is not traced.
        vector: float32 bytes of the answer, once it is there.
        adapter: the adapter that answers; None: the model itself.
        adapter_place: the worker's place of it, while the request may run.
        cache: how what it computes is kept after its end; None: as long as there is room.
        moves_on: it is to go on at another replica as soon as its prompt is computed.
        goes_on: it came with tokens of another replica: a stream that pauses until its admission.
    """

    seq: int
    client: bytes
    request_id: str
    tokens: "array[int]"
    num_prompt: int
    sampling: ResolvedSampling
    stop_ids: frozenset[int]
    stream: bool
    received_at: float
    tokenized_at: float
    priority: int
    queue_deadline: float | None
    deadline: float | None
    index: int
    slot_params: SlotSamplingParams | None
    grammar: GrammarForm | None
    num_known_tokens: int
    max_total_tokens: int
    due_at: float = 0.0
    tenant: str = ""
    weight: float = 1.0
    cache_salt: bytes = b""
    placement: int = 0

    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    in_flight: int = 0
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    first_page: int = 0
    page_capacity: int = 0
    prefix_path: list[Node] = field(default_factory=list)
    num_shareable: int = ALL_TOKENS
    prefix_node: Node | None = None
    prefix_miss: bytes = b""
    may_load: bool = True
    cached_tokens: int = 0
    num_cached_given: int = 0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    error: ErrorInfo | None = None
    prompt_logprobs: list[LogprobBlock] = field(default_factory=list)
    logprobs: list[LogprobBlock] = field(default_factory=list)
    waited_for: tuple[WaitReason, ...] = ()
    num_retractions: int = 0
    worker_crashes: int = 0
    cleared_at: int = 0
    guess_record: GuessRecord | None = None
    trace: SpanRecorder | None = None
    vector: bytes | None = None
    adapter: AdapterRef | None = None
    adapter_place: int = NO_ADAPTER
    cache: CacheHint | None = None
    moves_on: bool = False
    goes_on: bool = False

    @classmethod
    def from_submit(
        cls, seq: int, message: Submit, eos_ids: frozenset[int], index: int = 0
    ) -> "Request":
        """Return the request of one choice.

        Raises:
            ValueError: a parameter that the frontend fills in is missing.
        """
        sampling = ResolvedSampling.of_choice(message.params, index)
        prompt_ids, given_ids = unpack_ids(message.prompt_ids), sampling.params.first_token_ids
        tokens, num_prompt = prompt_ids + array("i", given_ids), len(prompt_ids)
        stop_ids = frozenset(sampling.params.stop_token_ids)
        if not sampling.params.ignore_eos:
            stop_ids |= eos_ids
        return cls(
            seq=seq,
            client=message.client,
            request_id=message.request_id,
            tokens=tokens,
            num_prompt=num_prompt,
            sampling=sampling,
            stop_ids=stop_ids,
            stream=message.stream,
            received_at=message.received_at,
            tokenized_at=message.tokenized_at,
            priority=message.priority,
            queue_deadline=message.queue_deadline,
            deadline=message.deadline,
            index=index,
            slot_params=slot_sampling_params(
                sampling, num_prompt, stop_ids, message.bad_words, message.grammar
            ),
            grammar=message.grammar,
            num_known_tokens=len(tokens),
            max_total_tokens=num_prompt + sampling.max_new_tokens,
            due_at=_due_at(message),
            tenant=message.tenant,
            weight=message.weight,
            cache_salt=message.cache_salt.encode(),
            placement=message.placement,
            trace=_recorder_of(message),
            adapter=message.adapter,
            cache=message.cache,
            moves_on=message.moves_on,
        )

    # --- life -------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.status is RequestStatus.FINISHED

    @property
    def can_stop(self) -> bool:
        """Whether a token or a text can end the answer before its limit."""
        params = self.sampling.params
        return bool(self.stop_ids or params.stop_strings or params.stop_regexes)

    @property
    def is_background(self) -> bool:
        """Whether the request runs only as far as others leave room, such as a line of a batch."""
        return self.priority == BACKGROUND_PRIORITY

    def finish(
        self, reason: FinishReason, matched_stop: int | None = None, error: ErrorInfo | None = None
    ) -> None:
        """Mark the request as ended."""
        self.status = RequestStatus.FINISHED
        self.finish_reason, self.matched_stop, self.error = reason, matched_stop, error

    def take_over(self, token_ids: "array[int]", first_token_at: float) -> None:
        """Begin with the tokens that another scheduler has published; without any, as submitted.

        If they are all of the answer, the request ends at once.
        """
        if token_ids:
            self.tokens[self.num_prompt :] = token_ids
            self.goes_on, self.due_at = True, 0.0
        self.num_known_tokens = len(self.tokens)
        self.first_token_at = first_token_at
        if token_ids and token_ids[-1] in self.stop_ids:
            self.finish(FinishReason.STOP, token_ids[-1])
        elif len(self.tokens) >= self.max_total_tokens:
            self.finish(FinishReason.LENGTH)

    def reset_for_new_worker(self) -> None:
        """Forget what the worker that died had computed, and the steps that it had in flight."""
        self.status = RequestStatus.WAITING
        self.num_known_tokens = len(self.tokens)
        self.num_computed_tokens = self.in_flight = self.page_capacity = self.first_page = 0
        self.slot = -1
        self.pages, self.prefix_path, self.prefix_node = [], [], None
        self.may_load = True
        self.forget_prompt_logprobs()

    def forget_prompt_logprobs(self) -> None:
        """Drop the logprobs of a prompt that is computed again, unless they were sent already."""
        if not self.first_token_at:
            self.prompt_logprobs.clear()

    def extend_forced(self, count: int) -> None:
        """Take in `count` forced tokens beyond the token that was sampled last.

        A step in flight computes them, too, as far as its pages reach, and samples only where it
        reaches the last of them.
        """
        if self.in_flight == 0:
            self.num_known_tokens += count
            return
        known = self.num_known_tokens - 1 + count
        self.num_computed_tokens = min(known, self.page_capacity)
        self.num_known_tokens = known + (self.num_computed_tokens == known)

    def extend_guessed(self, count: int) -> None:
        """Take in `count` tokens that were sampled after right guesses.

        All but the last are computed, so that a step in flight computes the last one.
        """
        self.num_known_tokens += count
        self.num_computed_tokens += count

    # --- counts -----------------------------------------------------------------------------------

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of known tokens that are not computed yet."""
        return self.num_known_tokens - self.num_computed_tokens

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, with those that were given."""
        return len(self.tokens) - self.num_prompt

    @property
    def will_soon_leave(self) -> bool:
        """Whether it moves on with its first tokens; after a few, it is taken to have to stay."""
        return self.moves_on and self.num_generated <= MAX_TOKENS_BEFORE_MOVE

    @property
    def given_ids(self) -> list[int]:
        """The tokens with which the answer begins, and which no step samples."""
        return self.sampling.params.first_token_ids

    @property
    def generated(self) -> "array[int]":
        """The generated tokens, with those that were given."""
        return self.tokens[self.num_prompt :]

    @property
    def published(self) -> "array[int]":
        """The tokens that its client may have: none before the first one is sampled."""
        return self.generated if self.first_token_at else array("i")

    @property
    def num_remaining_tokens(self) -> int:
        """Number of tokens that further steps may sample, without those in flight.

        At 0 no further step is needed: what is in flight samples the last possible token.
        """
        return self.max_total_tokens - self.num_known_tokens

    @property
    def size(self) -> int:
        """Memory of a request that has ended, in tokens: logprobs take the place of many."""
        blocks = [*self.logprobs, *self.prompt_logprobs]
        numbers = sum(len(block.values) + 2 * len(block.top_ids) for block in blocks) // 4
        numbers += len(self.vector or b"") // 4
        return len(self.tokens) + numbers + TOKENS_PER_LOGPROB_BLOCK * len(blocks)

    # --- the worker's slot ------------------------------------------------------------------------

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the client still waits for the prompt's logprobs: all of it is computed then."""
        return self.sampling.params.prompt_logprobs is not None and not self.first_token_at

    @property
    def has_kept_vector(self) -> bool:
        """Whether the answer is a few log-probabilities, which a journal has as it has tokens."""
        return self.pooling is not None and self.pooling.method == LOGPROBS

    @property
    def pooling(self) -> Pooling | None:
        """What vector takes the place of the first token; None: the answer is tokens."""
        return self.sampling.params.pooling

    @property
    def computes_all(self) -> bool:
        """Whether every token of the prompt has to be computed: none comes from the cache."""
        return self.wants_prompt_logprobs or self.num_read_at_end == self.num_known_tokens

    @property
    def makes_embedding(self) -> bool:
        """Whether the answer is a vector of the text, not scores or probabilities."""
        return self.pooling is not None and self.pooling.method in POOLINGS

    @property
    def goes_whole(self) -> bool:
        """Whether one step has to compute all of the prompt that is not cached."""
        return self.pooling is not None and self.pooling.num_read != 1

    @property
    def num_read_at_end(self) -> int:
        """Number of known tokens at the end that one step has to compute."""
        return 1 if self.pooling is None else self.pooling.num_read or self.num_known_tokens

    def new_slot(self) -> NewSlot:
        """Return the message that puts the request, which has a slot and pages, into its slot."""
        sampling, slot_params = self.sampling, self.slot_params
        if slot_params is not None and not self.wants_prompt_logprobs:
            slot_params = msgspec.structs.replace(slot_params, prompt_logprobs=None)
        return NewSlot(
            slot=self.slot,
            token_ids=pack_ids(self.tokens),
            computed=self.num_computed_tokens,
            pages=pack_ids(self.pages),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
            rules=slot_params,
            pooling=self.pooling,
            adapter=self.adapter_place,
        )


def _due_at(message: Submit) -> float:
    """Return when the first token of a request is due."""
    target_s, pooling = message.params.ttft_target, message.params.pooling
    if target_s is None:
        is_text = pooling is not None and pooling.method in POOLINGS
        target_s = TEXT_TARGET_S if is_text else DEFAULT_TTFT_TARGET_S
    due_at = message.received_at + target_s
    deadlines = (message.queue_deadline, message.deadline)
    return min((due_at, *(deadline for deadline in deadlines if deadline is not None)))


def _recorder_of(message: Submit) -> SpanRecorder | None:
    if message.trace is None:
        return None
    return SpanRecorder(message.trace, message.received_at, message.tokenized_at)


RequestFailure = tuple[Request, QuadrigaError]
