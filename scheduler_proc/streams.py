"""What the detokenizer must know of a request's stream: at its start, its end, or all of it."""

from itertools import groupby

from quadriga.wire.messages.arrays import pack_ids
from quadriga.wire.messages.logprobs import LogprobBlock
from quadriga.wire.messages.to_detok import (
    PROMPT_END_TOKENS,
    PromptLogprobsData,
    StreamEnd,
    StreamReplay,
    StreamStart,
)
from quadriga.wire.messages.trace import RequestTrace
from scheduler_proc.state.request import Request

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
        token_ids=pack_ids(request.generated),
        logprobs=merged_blocks(request.logprobs),
        closing=stream_end(request) if request.finished else None,
    )
