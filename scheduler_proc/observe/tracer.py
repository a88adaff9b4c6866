"""The tracer: what the steps mean for the spans of the traced requests.

It costs the other requests nothing: its methods are called only while a request is traced.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quadriga.wire.packing import num_ids, unpack_ids
from quadriga.wire.trace import Attributes
from quadriga.wire.worker import PagesLoaded, StepResult
from scheduler_proc.state.batch import Plan, ScheduleBatch
from scheduler_proc.state.request import Request, RequestStatus, WaitReason
from scheduler_proc.state.span_recorder import (
    LOAD,
    NO_PROMPTS,
    PREFILL,
    QUEUE,
    PromptTotals,
    SpanRecorder,
)

_FINISHED, _WAITING = RequestStatus.FINISHED, RequestStatus.WAITING
MAX_LACKS = 256  # changes of the reason for which requests wait


@dataclass(slots=True)
class Lack:
    """What successive plans lacked for the requests that waited. Times are Unix seconds."""

    reason: WaitReason
    first_at: float
    last_at: float


class Tracer:
    """Record the spans of the requests that have a SpanRecorder.

    Attributes:
        live: traced requests that have not ended, by number.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.live: dict[int, Request] = {}
        self._clock = clock
        self._lacks: deque[Lack] = deque(maxlen=MAX_LACKS)
        self._is_lacking = False
        self._prompts = NO_PROMPTS

    # --- requests come and go ---------------------------------------------------------------------

    def on_submit(self, requests: Iterable[Request], num_waiting: int, has_moved: bool) -> None:
        """Trace the choices of a request, before which `num_waiting` requests wait.

        has_moved: another replica had it, whose spans are lost.
        """
        now = self._clock()
        for request in requests:
            if request.trace is not None:
                if has_moved:
                    request.trace.on_move(now)
                request.trace.event("queued", now, waiting_before=num_waiting)
                self.live[request.seq] = request

    def on_restored(self, request: Request, last_token_at: float) -> None:
        """Trace a request that the journal of an earlier scheduler has. 0.0: without tokens."""
        if request.trace is None:
            return
        now = self._clock()
        request.trace.on_scheduler_restart(request.first_token_at, last_token_at, now)
        if request.finished:
            self.on_finish(request, now)
        else:
            self.live[request.seq] = request

    def on_grammar(self, request: Request, event: str) -> None:
        """Note that a request waits for its grammar, or has it."""
        if request.trace is not None:
            request.trace.event(event, self._clock(), reason=WaitReason.GRAMMAR.value)

    def on_adapter(self, request: Request, event: str) -> None:
        """Note that a request waits for its adapter, or has it."""
        if request.trace is not None:
            request.trace.event(event, self._clock(), reason=WaitReason.ADAPTER.value)

    def on_finish(self, request: Request, now: float) -> None:
        """End the spans of a request that has ended."""
        self.live.pop(request.seq, None)
        if not self.live:
            self._is_lacking = False
        if request.trace is not None:
            request.trace.finish(now)
            request.trace.attributes = _attributes(request)

    def note(self, event: str) -> None:
        """Note an event that concerns all requests."""
        now = self._clock()
        for request in self.live.values():
            _recorder(request).event(event, now)

    def on_worker_ready(self) -> None:
        """Note a new worker, which has nothing of the requests that ran."""
        now = self._clock()
        for request in self.live.values():
            if request.status is RequestStatus.WAITING:
                _recorder(request).event("worker ready", now)
            else:
                _recorder(request).on_worker_restart(now)

    def on_pages(self, seqs: Iterable[int], loaded: PagesLoaded) -> None:
        """Take in that a load has ended. seqs: of the requests that wait for it."""
        now = self._clock()
        for seq in seqs:
            request = self.live.get(seq)
            if request is not None:
                _recorder(request).enter(
                    LOAD, now - loaded.seconds, pages=loaded.num_loaded, fetched=loaded.num_fetched
                )
                _recorder(request).enter(QUEUE, now, after=LOAD)

    # --- steps ------------------------------------------------------------------------------------

    def on_plan(self, plan: Plan, now: float) -> None:
        """Take in a plan."""
        if plan.lacked is not None:
            self._add_lack(plan.lacked, now)
        self._is_lacking = plan.lacked is not None
        for request, reason in plan.retracted:
            if request.trace is not None:
                request.trace.event("retracted", now, reason=reason.value)
                if request.status is RequestStatus.WAITING:
                    request.trace.enter(QUEUE, now, after="retraction", reason=reason.value)
        for request in plan.admitted:
            if request.trace is not None:
                self._add_wait_events(request.trace)
                request.trace.enter(PREFILL, now)

    def _add_lack(self, reason: WaitReason, now: float) -> None:
        last = self._lacks[-1] if self._lacks and self._is_lacking else None
        if last is not None and last.reason is reason:
            last.last_at = now
        else:
            self._lacks.append(Lack(reason, now, now))

    def _add_wait_events(self, trace: SpanRecorder) -> None:
        """Add what the plans lacked while a request was in the queue."""
        if trace.phase is None:
            return
        queued_at = trace.phase.began_at
        for lack in self._lacks:
            if lack.last_at >= queued_at:
                trace.event("waits", max(lack.first_at, queued_at), reason=lack.reason.value)

    def on_step(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Take in a step after the core has."""
        self._count_prompts(batch, result)
        # Read once: this loop runs for each row of each step.
        began, ended, prompts = result.began, result.ended, self._prompts
        num_decodes, num_rows = batch.num_decodes, batch.batch_size
        token_ids, further = unpack_ids(result.token_ids), _further_tokens(result)
        for row, request in enumerate(batch.requests):
            trace = request.trace
            if trace is None or trace.phase is None:
                continue
            if row < num_decodes:
                num_tokens = (token_ids[row] >= 0) + (further[row] if further else 0)
                trace.on_decode(began, ended, num_tokens, num_rows, prompts)
            else:
                tokens, is_last = batch.num_tokens[row], token_ids[row] >= 0
                trace.on_chunk(
                    began, ended, is_last, prompts, tokens=tokens, step=batch.step, rows=num_rows
                )
            status = request.status
            if status is _FINISHED:
                trace.finish(ended)
            elif status is _WAITING:
                trace.enter(QUEUE, ended, after="retraction")

    def _count_prompts(self, batch: ScheduleBatch, result: StepResult) -> None:
        num_parts = batch.batch_size - batch.num_decodes
        if num_parts:
            before = self._prompts
            self._prompts = PromptTotals(
                before.num_parts + num_parts,
                before.num_tokens + sum(batch.num_tokens[batch.num_decodes :]),
                before.seconds + result.ended - result.began,
            )


def _further_tokens(result: StepResult) -> Counter[int]:
    """Return the tokens of each row beyond the sampled one; empty if there are none."""
    further: Counter[int] = Counter()
    for guessed in result.guessed:
        further[guessed.row] += num_ids(guessed.token_ids)
    for forced in result.forced:
        further[forced.row] += num_ids(forced.token_ids)
    return further


def _recorder(request: Request) -> SpanRecorder:
    assert request.trace is not None
    return request.trace


def _attributes(request: Request) -> Attributes:
    """Return what the span of the whole request shows, in the words of OpenTelemetry and vLLM."""
    assert request.finish_reason is not None
    params = request.sampling.params
    attributes: Attributes = {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": request.sampling.max_new_tokens,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.request.top_p": request.sampling.top_p,
        "gen_ai.response.finish_reason": request.finish_reason.value,
        "gen_ai.usage.prompt_tokens": request.num_prompt,
        "gen_ai.usage.completion_tokens": request.num_generated,
        "quadriga.cached_tokens": request.cached_tokens,
        "quadriga.choice": request.index,
        "quadriga.priority": request.priority,
        "quadriga.retractions": request.num_retractions,
    }
    if request.admitted_at:
        queue_s = request.admitted_at - request.tokenized_at
        attributes["gen_ai.latency.time_in_queue"] = round(queue_s, 6)
    if request.first_token_at:
        first_s = request.first_token_at - request.received_at
        attributes["gen_ai.latency.time_to_first_token"] = round(first_s, 6)
    if request.waited_for:
        attributes["quadriga.waited_for"] = ", ".join(reason.value for reason in request.waited_for)
    return attributes
