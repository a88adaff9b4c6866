"""Further pages for running requests, and the retraction of others where the pool is full.

`PageGrowth` gives running requests the pages of their next tokens. `Retraction` chooses which
running requests give up slot and pages, for want of pages or for more urgent requests; a retracted
request waits again, and its stream goes on unchanged.
"""

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning.admission import CoreState
from scheduler_proc.planning.batching import Batching
from scheduler_proc.state.batch import Plan
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


class PageGrowth:
    """Give running requests the pages of their next tokens, and note them in the plan.

    A request gets a page, waits for one, or is retracted itself. One that fills the whole pool
    alone fails.

    Args:
        state: the requests and pages.
        batching: gives pages that no request needs, and removes a request that fails.
        retraction: chooses and retracts others.
    """

    def __init__(self, state: CoreState, batching: Batching, retraction: Retraction) -> None:
        self._kv = state.kv
        self._admission = state.admission
        self._running = state.running
        self._offload = state.offload
        self._batching = batching
        self._retraction = retraction

    def grow_decodes(self, group: list[Request], plan: Plan) -> list[Request]:
        """Append a page to each request of `group` that needs one for its next token.

        Returns:
            The requests that can decode.
        """
        full = [r for r in group if r.num_computed_tokens == r.page_capacity]
        if not full:
            return group
        for request in full:
            if request in self._running:
                self._append_page(request, plan)
        rows = [r for r in group if r.num_computed_tokens < r.page_capacity]
        if plan.has_retracted:
            rows = [request for request in rows if request in self._running]
        for request in full:
            if request.num_computed_tokens < request.page_capacity and request in self._running:
                plan.batch.grown += (request.slot, request.pages[-1])
        return rows

    def grow_prompt(self, request: Request, count: int, plan: Plan, may_retract: bool) -> int:
        """Append pages for the next `count` tokens of a prompt. Return how many have pages.

        A prompt got all of its pages when it was admitted, unless every layer has a window. Then it
        takes further ones as far as there are any; others are retracted for the first one only.
        """
        room = request.page_capacity - request.num_computed_tokens
        while room < count and ((room == 0 and may_retract) or self._kv.num_available):
            if not self._append_page(request, plan):
                return 0
            plan.batch.grown += (request.slot, request.pages[-1])
            room += self._kv.page_size
        return min(count, room)

    def _append_page(self, request: Request, plan: Plan) -> bool:
        """Append a page to a running request. Return whether there was one.

        The pages of requests that have ended or were retracted come back when their steps in flight
        are answered, and those of loads when they are done: the request waits for them.
        """
        while self._kv.num_available == 0:
            if self._admission.pending_release:
                return False
            if self._batching.give_pages():
                continue
            if victim := self._retraction.victim():
                self._retraction.retract(victim, RetractReason.PAGES, plan)
                if victim is request:
                    return False
            elif not self._kv.free_duplicates(request):
                if not plan.in_flight and not self._offload.loads:
                    self._fail(request, plan)
                return False
        self._kv.append_page(request)
        return True

    def _fail(self, request: Request, plan: Plan) -> None:
        plan.failed.append((request, self._admission.pool_is_full(request)))
        plan.has_retracted = True
        self._batching.remove(request)
