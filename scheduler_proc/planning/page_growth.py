"""Further pages for running requests: others are retracted for them where the pool is full."""

from scheduler_proc.planning.batching import ContinuousBatching
from scheduler_proc.planning.core_state import CoreState
from scheduler_proc.planning.retraction import Retraction
from scheduler_proc.state.plan import Plan
from scheduler_proc.state.request import Request, RetractReason


class PageGrowth:
    """Give running requests the pages of their next tokens, and note them in the plan.

    A request gets a page, waits for one, or is retracted itself. One that fills the whole pool
    alone fails.

    Args:
        state: the requests and pages.
        batching: gives up padding for pages, and removes a request that fails.
        retraction: chooses and retracts others.
    """

    def __init__(
        self, state: CoreState, batching: ContinuousBatching, retraction: Retraction
    ) -> None:
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

        The pages of padding and of retracted requests come back when their steps in flight are
        answered, and those of loads when they are done: the request waits for them.
        """
        while self._kv.num_available == 0:
            if self._admission.pending_release:
                return False
            if self._batching.has_padding:
                self._batching.release_padding()
            elif victim := self._retraction.victim():
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
