"""Why requests have no row in a step: derived from the plan and from the state after it."""

from collections.abc import Iterator
from itertools import chain, islice

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.live import SkipReason
from scheduler_proc.lifecycle import RequestLifecycle
from scheduler_proc.planning.quarantine import is_quarantined
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.plan import Plan
from scheduler_proc.state.request import Request, RequestStatus

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
    return ((SkipReason.GRAMMAR, request) for request in lifecycle.grammars)


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
