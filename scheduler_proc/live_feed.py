"""The live feed of the scheduler: one message a step, made only while a client watches.

`live_tree` summarizes the prefix tree, `skipped_requests` derives why a request has no row in a
step, and `StepFeed` makes the messages.
"""

from collections import deque
from collections.abc import Iterator
from heapq import nlargest
from itertools import chain, islice

import msgspec

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.client import short_address
from quadriga.wire.live import (
    MAX_LIVE_EVENTS,
    MAX_LIVE_ROWS,
    MAX_LIVE_TREE_NODES,
    MAX_LIVE_WAITING,
    MAX_WATCH_S,
    EventKind,
    LiveEvent,
    LiveGauges,
    LiveRequest,
    LiveStep,
    LiveTree,
    RowKind,
    SkipReason,
)
from quadriga.wire.sockets import Sender
from quadriga.wire.to_detok import LiveFrame
from quadriga.wire.to_scheduler import WatchSteps
from quadriga.wire.worker import StepResult
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.planning.quarantine import is_quarantined
from scheduler_proc.state.batch import Plan, ScheduleBatch
from scheduler_proc.state.prefix_tree import Node, PrefixTree
from scheduler_proc.state.request import FinishReason, Request, RequestStatus

# The prefix tree in a few numbers: chains of pages merged, within fixed bounds of time and size.
#
# A tree may have a hundred thousand pages. At most MAX_VISITED_PAGES are looked at in one message,
# those that requests hold first.

MAX_VISITED_PAGES = 2048
MAX_CHILDREN_SEEN = 512  # of one node
MAX_CHILDREN = 64  # of one node in the summary


def live_tree(tree: PrefixTree) -> LiveTree:
    """Return a summary of the tree, from the root down, level by level."""
    parents: list[int] = []
    num_pages: list[int] = []
    num_holders: list[int] = []
    num_visited = num_shared = 0
    is_whole = True
    queue = deque([(-1, tree.root)])
    while queue:
        place, node = queue.popleft()
        children = _first_children(node)
        is_whole = is_whole and len(children) == len(node.children)
        for child in children:
            if len(parents) >= MAX_LIVE_TREE_NODES or num_visited >= MAX_VISITED_PAGES:
                return LiveTree(parents, num_pages, num_holders, num_shared, False)
            length, last = _chain(child, MAX_VISITED_PAGES - num_visited)
            num_visited += length
            num_shared += length if child.ref_count > 1 else 0
            queue.append((len(parents), last))
            parents.append(place)
            num_pages.append(length)
            num_holders.append(child.ref_count)
    return LiveTree(parents, num_pages, num_holders, num_shared, is_whole)


def _first_children(node: Node) -> list[Node]:
    """Return the children that the summary has: the newest, those with the most holders first."""
    newest = islice(reversed(node.children.values()), MAX_CHILDREN_SEEN)
    return nlargest(MAX_CHILDREN, newest, key=_num_holders)


def _num_holders(node: Node) -> int:
    return node.ref_count


def _chain(node: Node, max_pages: int) -> tuple[int, Node]:
    """Return the number of pages from a node down to the next fork or change, and its last one."""
    length = 1
    while len(node.children) == 1 and length < max_pages:
        (child,) = node.children.values()
        if child.ref_count != node.ref_count:
            break
        node, length = child, length + 1
    return length, node


# Why requests have no row in a step: derived from the plan and from the state after it.

Skipped = Iterator[tuple[SkipReason, Request]]


def skipped_requests(
    args: SchedulerArgs, lifecycle: RequestLifecycle, plan: Plan | None, max_requests: int
) -> tuple[dict[SkipReason, list[Request]], int]:
    """Return the requests without a row in a plan that was just made, by reason.

    Args:
        args: the policy.
        lifecycle: the requests.
        plan: the plan; None: only requests are listed that no plan can have.
        max_requests: largest number of requests that are listed.

    Returns:
        The listed requests, those of the waiting queue in its order, and how many others wait.
    """
    groups: dict[SkipReason, list[Request]] = {}
    num_queued = 0
    found = _unplannable(lifecycle)
    if plan is not None and lifecycle.core.kv.num_pages:
        running, queued = _running(lifecycle, plan), _queued(args, lifecycle, plan, max_requests)
        found = chain(found, running, queued)
    for reason, request in islice(found, max_requests):
        groups.setdefault(reason, []).append(request)
        num_queued += request.slot < 0
    return groups, lifecycle.num_waiting - num_queued


def _unplannable(lifecycle: RequestLifecycle) -> Skipped:
    """Yield the requests that are not in the core's queue yet."""
    if not lifecycle.core.kv.num_pages:
        return ((SkipReason.WORKER, request) for request in lifecycle.table)
    grammars = ((SkipReason.GRAMMAR, request) for request in lifecycle.grammars)
    return chain(grammars, ((SkipReason.ADAPTER, request) for request in lifecycle.adapters))


def _running(lifecycle: RequestLifecycle, plan: Plan) -> Skipped:
    """Yield the requests that hold a slot."""
    core, batch = lifecycle.core, plan.batch
    in_step = {request.seq for request in batch.requests}
    alone = _runs_alone(lifecycle)
    for request in core.admission.holders.values():
        if request.seq in in_step or request.finished:
            continue
        if request.status is RequestStatus.RETRACTED:
            yield SkipReason.RETRACTED, request
        elif alone not in (None, request):
            yield SkipReason.QUARANTINE, request
        elif request.status is RequestStatus.DECODING and request.num_remaining_tokens <= 0:
            yield SkipReason.ENDING, request
        elif request.status is RequestStatus.PREFILLING:
            yield _reason_of_partial(request, batch), request
        elif not batch.num_decodes:
            yield SkipReason.TURN, request
        elif batch.num_decodes >= core.running.width:
            yield SkipReason.WIDTH, request
        else:
            yield SkipReason.PAGES, request


def _reason_of_partial(request: Request, batch: ScheduleBatch) -> SkipReason:
    """Return why a request whose prompt is partly computed has no row in a step."""
    if batch.num_prompts == 0:
        return SkipReason.TURN
    has_pages = request.num_computed_tokens < request.page_capacity
    return SkipReason.BUDGET if has_pages else SkipReason.PAGES


def _runs_alone(lifecycle: RequestLifecycle) -> Request | None:
    """Return the quarantined request whose turn it is. `Quarantine.current` would change state."""
    return next(filter(is_quarantined, lifecycle.core.quarantine), None)


def _queued(
    args: SchedulerArgs, lifecycle: RequestLifecycle, plan: Plan, max_requests: int
) -> Skipped:
    """Yield the requests of the core that have no slot."""
    core = lifecycle.core
    yield from ((SkipReason.QUARANTINE, r) for r in core.quarantine if r.slot < 0)
    if not len(core.waiting):
        return
    queued = core.waiting.first(min(len(core.waiting), max_requests), core.prefill.budget.tokens)
    if _runs_alone(lifecycle) is not None:
        yield from ((SkipReason.QUARANTINE, request) for request in queued)
        return
    lacked = SkipReason.TURN if plan.lacked is None else SkipReason(plan.lacked.value)
    goes_first = max(plan.admitted, key=_seq, default=None)
    for request in queued:
        if goes_first is None or goes_first.seq < request.seq:
            goes_first = request
            yield lacked, request
        else:
            yield _overtaken_reason(args, request, goes_first), request


def _seq(request: Request) -> int:
    return request.seq


def _overtaken_reason(args: SchedulerArgs, request: Request, goes_first: Request) -> SkipReason:
    """Return why a request that arrived later goes first."""
    if args.fair_tenants and goes_first.tenant != request.tenant:
        return SkipReason.FAIRNESS
    if args.fair_clients and goes_first.client != request.client:
        return SkipReason.FAIRNESS
    if args.schedule_policy == "priority" and goes_first.priority > request.priority:
        return SkipReason.PRIORITY
    return SkipReason.POLICY


# The live feed of the scheduler: made while clients watch, one message a step.
#
# `Scheduler` has no feed unless a client watches. Then the feed is called with each plan and
# result, and at each end of a request; it reads the scheduler's state and changes nothing of it.

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
        gauges = self._gauges()
        # The last message before the server is idle stays on the screen: its tree is of now.
        is_whole = now >= self._whole_at or (plan is None and not gauges.running)
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
            gauges=gauges,
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
