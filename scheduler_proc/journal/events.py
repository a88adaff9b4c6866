"""The record of what happened in one step, from which detokenizer and journal are fed.

`StepEvents` gathers it; `stream_start`, `stream_end` and `stream_replay` return what the
detokenizer must know of a request's stream at its start, at its end, or all of it.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import groupby

from quadriga.sampling.params import LIMITS
from quadriga.wire.logprobs import LogprobBlock, SampledLogprobs, block_of_token
from quadriga.wire.packing import pack_ids, unpack_ids
from quadriga.wire.to_detok import (
    PROMPT_END_TOKENS,
    PromptLogprobsData,
    ReplicaNews,
    StepOutput,
    StreamEnd,
    StreamReplay,
    StreamStart,
)
from quadriga.wire.to_scheduler import Submit
from quadriga.wire.trace import RequestTrace
from scheduler_proc.state.batch import StepUpdate
from scheduler_proc.state.request import Request

# What the detokenizer must know of a request's stream: at its start, its end, or all of it.

REQUEST_SPAN = "llm_request"  # as vLLM calls it
MAX_ERROR_CHARS = 500
MAX_SEPARATE_BLOCKS = 256


def stream_start(request: Request) -> StreamStart:
    """Return what the detokenizer must know of a request."""
    params = request.sampling.params
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
        logprobs=params.num_top_logprobs,
        prompt=_prompt_logprobs(request),
        text_lengths=params.text_lengths,
        prompt_end=_prompt_end(request) if params.continues_prompt else b"",
        placement=request.placement,
        given_ids=pack_ids(request.given_ids),
    )


def _prompt_end(request: Request) -> bytes:
    first = max(0, request.num_prompt - PROMPT_END_TOKENS)
    return pack_ids(request.tokens[first : request.num_prompt])


def _prompt_logprobs(request: Request) -> PromptLogprobsData | None:
    """Return the prompt logprobs, once all are there and where the client wants them."""
    width = request.sampling.params.prompt_logprobs
    if width is None or not request.first_token_at:
        return None
    ids = pack_ids(request.tokens[: request.num_prompt])
    return PromptLogprobsData(ids, width, list(request.prompt_logprobs))


def stream_end(request: Request) -> StreamEnd:
    """Return the terminal message of a request."""
    assert request.finish_reason is not None
    return StreamEnd(
        seq=request.seq,
        client=request.client,
        request_id=request.request_id,
        finish_reason=request.finish_reason.value,
        matched_stop=request.matched_stop,
        error=request.error,
        prompt_tokens=request.num_prompt,
        cached_tokens=request.cached_tokens,
        received_at=request.received_at,
        tokenized_at=request.tokenized_at,
        admitted_at=request.admitted_at,
        first_token_at=request.first_token_at,
        index=request.index,
        trace=_trace_of(request),
        placement=request.placement,
        vector=request.vector,
    )


def _trace_of(request: Request) -> RequestTrace | None:
    """Return the spans of a traced request that has ended."""
    trace, error = request.trace, request.error
    if trace is None:
        return None
    return RequestTrace(
        trace.context,
        REQUEST_SPAN,
        request.request_id,
        request.index,
        trace.spans,
        trace.attributes,
        "" if error is None else f"{error.code}: {error.message[:MAX_ERROR_CHARS]}",
    )


def merged_blocks(blocks: list[LogprobBlock]) -> list[LogprobBlock]:
    """Return the logprobs of many tokens in few blocks, which are sent and read faster."""
    if len(blocks) <= MAX_SEPARATE_BLOCKS:
        return blocks
    merged = []
    for width, group in groupby(blocks, lambda block: block.width):
        same = list(group)
        merged.append(
            LogprobBlock(
                b"".join(block.values for block in same),
                width,
                b"".join(block.top_ids for block in same),
                b"".join(block.top_values for block in same),
            )
        )
    return merged


def stream_replay(request: Request) -> StreamReplay:
    """Return all of a request's stream up to now."""
    return StreamReplay(
        opening=stream_start(request),
        token_ids=pack_ids(request.published),
        logprobs=merged_blocks(request.logprobs),
        closing=stream_end(request) if request.finished else None,
    )


MAX_TOP_LOGPROBS = int(LIMITS["logprobs"].maximum or 0)


@dataclass(slots=True)
class StepEvents:
    """Everything that happened since the last record, struct of arrays.

    Attributes:
        accepted: messages that came in, with the requests of their choices.
        time: end of the worker's step, Unix seconds; 0.0 where there was none.
        started: requests that have their first token.
        seqs: numbers of the requests that have a new token, and
        token_ids: these tokens.
        logprobs: logprobs of these tokens, where clients want them; rows are places in `seqs`.
        logprob_requests: the requests of these rows.
        finished: requests that ended, in this order.
        acknowledged: numbers of ended requests whose clients have their ends.
        replayed: streams for a new detokenizer, or for a client that has reconnected.
    """

    accepted: list[tuple[Submit, list[Request]]] = field(default_factory=list)
    time: float = 0.0
    started: list[Request] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: SampledLogprobs | None = None
    logprob_requests: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    replayed: list[StreamReplay] = field(default_factory=list)

    def add_update(self, update: StepUpdate, time: float) -> None:
        """Take in the tokens of the worker's step that ended at `time`."""
        self.time = time
        self.started, self.seqs, self.token_ids = update.started, update.seqs, update.token_ids

    def add_logprobs(self, sampled: SampledLogprobs, requests: list[Request]) -> None:
        """Take in the logprobs of the step that `requests` ran, after its tokens."""
        places: dict[int, deque[int]] = {}  # of each request, whose tokens are in order
        for place, seq in enumerate(self.seqs):
            places.setdefault(seq, deque()).append(place)
        rows = unpack_ids(sampled.rows).tolist()
        kept = [left.popleft() if (left := places.get(requests[row].seq)) else -1 for row in rows]
        self.logprobs = SampledLogprobs(pack_ids(kept), sampled.block)
        for index, row in enumerate(rows):
            if kept[index] >= 0:
                width = sampled.block.width
                if width > MAX_TOP_LOGPROBS:  # another request has chosen ids
                    width = requests[row].sampling.params.num_top_logprobs or 0
                requests[row].logprobs.append(block_of_token(sampled.block, index, width))
                self.logprob_requests.append(requests[row])

    @property
    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not (self.accepted or self.acknowledged or self.has_output)

    @property
    def has_output(self) -> bool:
        """Whether there is something for the detokenizer."""
        return bool(self.seqs or self.finished or self.replayed)

    def to_detok(
        self,
        now: float,
        num_waiting: int,
        wait_s: float | None,
        session: int,
        news: ReplicaNews | None,
        finished: list[Request],
    ) -> StepOutput:
        """Return the message for the detokenizer of this session.

        `finished` are the requests whose ends it has; a replay to come has those of the others.
        """
        return StepOutput(
            time=self.time or now,
            opened=[stream_start(request) for request in self.started],
            seqs=self.seqs,
            token_ids=pack_ids(self.token_ids),
            closed=[stream_end(request) for request in finished],
            logprobs=self.logprobs,
            waiting=num_waiting,
            session=session,
            replayed=self.replayed,
            wait_s=wait_s,
            news=news,
        )
