"""The live feed of the scheduler: made while clients watch, one message a step.

`Scheduler` has no feed unless a client watches. Then the feed is called with each plan and result,
and at each end of a request; it reads the scheduler's state and changes nothing of it.
"""

from itertools import chain

import msgspec

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.client_address import short_address
from quadriga.wire.messages.live import (
    MAX_LIVE_EVENTS,
    MAX_LIVE_ROWS,
    MAX_LIVE_WAITING,
    MAX_WATCH_S,
    EventKind,
    LiveEvent,
    LiveGauges,
    LiveRequest,
    LiveStep,
    RowKind,
)
from quadriga.wire.messages.to_detok import LiveFrame
from quadriga.wire.messages.to_scheduler import WatchSteps
from quadriga.wire.messages.worker import StepResult
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.observe.feed.skipped import skipped_requests
from scheduler_proc.observe.feed.tree import live_tree
from scheduler_proc.sender import Sender
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.plan import Plan
from scheduler_proc.state.request import FinishReason, Request

WHOLE_INTERVAL_S = 1.0  # between two messages with all requests and the tree

_encode = msgspec.msgpack.Encoder().encode


class StepFeed:
    """Make the messages of the feed, and send them.

    Args:
        args: the policy.
        lifecycle: the requests, and the core that has them.
        detok: the way to the viewers.
    """

    def __init__(self, args: SchedulerArgs, lifecycle: RequestLifecycle, detok: Sender) -> None:
        self._args = args
        self._lifecycle = lifecycle
        self._detok = detok
        self._until = 0.0
        self._replica = 0
        self._number = 0
        self._whole_at = 0.0
        self._described: set[int] = set()
        self._events: list[LiveEvent] = []
        self._ended: list[StepResult] = []

    def watch(self, message: WatchSteps, now: float) -> None:
        """Go on for some seconds; the next message is a whole one if there is a new viewer."""
        self._until = max(self._until, now + min(message.seconds, MAX_WATCH_S))
        self._replica = message.replica
        if message.is_new:
            self._whole_at = 0.0

    def is_over(self, now: float) -> bool:
        """Return whether the time of the last viewer has passed."""
        return now >= self._until

    # --- what happens -----------------------------------------------------------------------------

    def on_result(self, result: StepResult) -> None:
        """Note a step that has ended."""
        self._ended.append(result)

    def on_finish(self, request: Request, now: float) -> None:  # noqa: ARG002
        """Note the end of a request."""
        self._described.discard(request.seq)
        if request.error is None:
            assert request.finish_reason is not None
            self._add_event(EventKind.FINISHED, request, request.finish_reason.value)
            return
        is_refusal = request.finish_reason is FinishReason.ERROR and not request.admitted_at
        kind = EventKind.REFUSED if is_refusal else EventKind.FINISHED
        self._add_event(kind, request, request.error.code)

    def on_plan(self, plan: Plan, now: float) -> None:
        """Send a message about a step that was planned."""
        for request, _ in plan.retracted:
            self._add_event(EventKind.RETRACTED, request)
        if plan.admitted:
            batch = plan.batch
            seqs = (request.seq for request in batch.requests)
            counts = dict(zip(seqs, batch.num_tokens, strict=True))
            for request in plan.admitted:
                num_cached = request.num_computed_tokens - counts.get(request.seq, 0)
                self._add_event(EventKind.ADMITTED, request, str(num_cached))
        self._send(plan, now)

    def on_idle(self, now: float) -> None:
        """Send what happened since the last plan, or a whole message to a new viewer."""
        if self._events or not self._whole_at:
            self._send(None, now)

    def _add_event(self, kind: EventKind, request: Request, detail: str = "") -> None:
        if len(self._events) < MAX_LIVE_EVENTS:
            self._events.append(LiveEvent(kind, request.seq, detail))

    # --- the message ------------------------------------------------------------------------------

    def _send(self, plan: Plan | None, now: float) -> None:
        lifecycle, ended = self._lifecycle, self._ended
        is_whole = now >= self._whole_at
        batch, admitted = (ScheduleBatch(), []) if plan is None else (plan.batch, plan.admitted)
        rows = batch.requests[:MAX_LIVE_ROWS]
        skipped, num_hidden = skipped_requests(self._args, lifecycle, plan, MAX_LIVE_WAITING)
        listed = [*rows, *chain.from_iterable(skipped.values())]
        message = LiveStep(
            number=self._number,
            step=batch.step,
            time=now,
            seqs=[request.seq for request in rows],
            kinds=_kinds(batch, rows),
            num_tokens=batch.num_tokens[:MAX_LIVE_ROWS],
            num_hidden_rows=batch.batch_size - len(rows),
            skipped={reason: [r.seq for r in group] for reason, group in skipped.items()},
            num_hidden_skipped=num_hidden,
            requests=[_describe(r) for r in self._undescribed(listed, admitted, is_whole)],
            is_whole=is_whole,
            events=self._events,
            ended_steps=[result.step for result in ended],
            began_at=[result.began for result in ended],
            ended_at=[result.ended for result in ended],
            gauges=self._gauges(),
            tree=live_tree(lifecycle.core.kv.tree) if is_whole else None,
            replica=self._replica,
        )
        self._detok.send(LiveFrame(_encode(message)))
        self._number += 1
        self._events, self._ended = [], []
        if is_whole:
            self._whole_at = now + WHOLE_INTERVAL_S

    def _undescribed(
        self, listed: list[Request], admitted: list[Request], is_whole: bool
    ) -> list[Request]:
        """Return the requests that this message describes."""
        if is_whole:
            self._described.clear()
        known = self._described.difference(request.seq for request in admitted)
        new = [request for request in listed if request.seq not in known]
        self._described.update(request.seq for request in new)
        return new

    def _gauges(self) -> LiveGauges:
        lifecycle = self._lifecycle
        core, stats = lifecycle.core, lifecycle.stats
        num_waiting = lifecycle.num_waiting
        return LiveGauges(
            running=len(lifecycle.table) - num_waiting,
            waiting=num_waiting,
            waiting_for_grammar=lifecycle.grammars.num_waiting,
            pages_total=core.kv.num_pages,
            pages_free=core.kv.num_free,
            pages_cached=core.kv.num_cached,
            pages_held=core.kv.num_held,
            steps=stats.steps,
            prompt_tokens_total=stats.prompt_tokens,
            cached_tokens_total=stats.cached_tokens,
            generation_tokens_total=stats.generation_tokens,
            retractions=core.num_retractions,
        )


def _kinds(batch: ScheduleBatch, rows: list[Request]) -> list[RowKind]:
    """Return the kind of each row of a step that was just planned."""
    num_decodes = min(batch.num_decodes, len(rows))
    return [RowKind.DECODE] * num_decodes + [_prefill_kind(row) for row in rows[num_decodes:]]


def _prefill_kind(request: Request) -> RowKind:
    if request.first_token_at or request.num_retractions:
        return RowKind.RECOMPUTE
    return RowKind.CHUNK if request.num_computed_tokens < request.num_prompt else RowKind.PREFILL


def _describe(request: Request) -> LiveRequest:
    return LiveRequest(
        seq=request.seq,
        request_id=request.request_id,
        client=short_address(request.client),
        tenant=request.tenant,
        index=request.index,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt,
        num_generated_tokens=request.num_generated,
        num_computed_tokens=request.num_computed_tokens,
        cached_tokens=request.cached_tokens,
        max_total_tokens=request.max_total_tokens,
        num_retractions=request.num_retractions,
        received_at=request.received_at,
        admitted_at=request.admitted_at,
        first_token_at=request.first_token_at,
        waited_for=[reason.value for reason in request.waited_for],
    )
