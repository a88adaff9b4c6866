"""Take the pages of running requests for others; what was taken waits, and goes on later."""

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.planning.core_state import CoreState
from scheduler_proc.state.plan import Plan
from scheduler_proc.state.request import Request, RequestFailure, RequestStatus, RetractReason

DEFAULT_PREEMPTION_THRESHOLD = 10


class Retraction:
    """Chooses and retracts running requests, for want of pages or for more urgent ones.

    Args:
        args: the scheduler's flags.
        state: the requests and pages.
        num_retractions: those before.

    Attributes:
        num_retractions: number of retractions.
        preempts: urgent requests take the slots of others.
    """

    def __init__(self, args: SchedulerArgs, state: CoreState, num_retractions: int) -> None:
        self._state = state
        self._admission = state.admission
        self._running = state.running
        self.num_retractions = num_retractions
        self._by_priority = by_priority = args.schedule_policy == "priority"
        self._retraction_key = priority_retraction_key if by_priority else retraction_key
        # Fair turns would give the slot back to the request that was preempted, over and over.
        self.preempts = by_priority and not args.is_fair
        self._threshold = args.priority_preemption_threshold or DEFAULT_PREEMPTION_THRESHOLD

    def victim(self) -> Request | None:
        """Return the request that gives its pages to others; None where only one runs.

        Of prompts that are partly computed it is the last of those that have the smallest share, so
        that two of them do not retract one another in turns.
        """
        running = self._running.all_requests
        if len(running) < 2:
            return None
        victim, partial = min(running, key=self._retraction_key), self._running.partial
        if victim.seq not in partial:
            return victim
        return min(partial.values(), key=lambda request: (self._rank(request), -request.seq))

    def _rank(self, request: Request) -> int:
        """Return the priority as far as it counts."""
        return request.priority if self._by_priority else -int(request.is_background)

    def preempt_for(self, request: Request, plan: Plan) -> None:
        """Retract the decoding request of the lowest priority for a much more urgent one."""
        victim = min(self._running, key=priority_retraction_key, default=None)
        if victim is not None and request.priority - victim.priority >= self._threshold:
            self.retract(victim, RetractReason.PRIORITY, plan)

    def preempt_partial(self, first: list[Request], plan: Plan) -> None:
        """Retract partially prefilled requests, which take up whole steps, for an urgent one."""
        for partial in list(self._running.partial.values()):
            if any(request.priority - partial.priority >= self._threshold for request in first):
                self.retract(partial, RetractReason.PRIORITY, plan)

    def retract(self, request: Request, reason: RetractReason, plan: Plan) -> None:
        """Take a running request's pages for others: it waits again.

        What is not cached any more by then is computed again; its stream goes on unchanged.
        """
        self._running.remove(request)
        self.num_retractions += 1
        request.num_retractions += 1
        plan.has_retracted = True
        plan.retracted.append((request, reason))
        self._admission.ratio.on_retract(list(self._running))
        request.status = RequestStatus.RETRACTED
        self._admission.pending_release.add(request.seq)
        if request.in_flight == 0:
            self.requeue(request, plan.failed)

    def requeue(self, request: Request, failed: list[RequestFailure]) -> None:
        """Queue a retracted request of which no step is in flight any more."""
        self._admission.release(request)
        if self._admission.never_fits(request):
            failed.append((request, self._admission.pool_is_full(request)))
            return
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.may_load = True
        request.forget_prompt_logprobs()
        self._state.queue(request)


def retraction_key(request: Request) -> tuple[bool, int, int]:
    """Order of retraction: the background, then the request that has generated least."""
    return not request.is_background, request.num_generated, -request.num_prompt


def priority_retraction_key(request: Request) -> tuple[int, int, int]:
    """Order of retraction where priorities count: the lowest priority comes first."""
    return request.priority, request.num_generated, -request.num_prompt
