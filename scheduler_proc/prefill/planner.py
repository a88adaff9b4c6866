"""The prompts of a step: which requests are admitted, and how many tokens each prompt gets."""

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.planning.batching import ContinuousBatching
from scheduler_proc.planning.core_state import CoreState
from scheduler_proc.planning.page_growth import PageGrowth
from scheduler_proc.planning.retraction import Retraction
from scheduler_proc.planning.step_cost import StepCostModel
from scheduler_proc.prefill.budget import PrefillBudget
from scheduler_proc.prefill.sharing import PrefillSharing, age_of
from scheduler_proc.prefill.step_target import StepTarget
from scheduler_proc.state.batch import ScheduleBatch
from scheduler_proc.state.plan import Plan
from scheduler_proc.state.request import Request, WaitReason


class PrefillPlanner:
    """Add prompts to steps.

    A step's tokens go to prompts under way, as far as they have a right to them; then to those
    that wait; and what these leave, to prompts under way again.

    Args:
        args: the scheduler's flags.
        state: the requests and pages.
        budget: prompt tokens of a step.
        costs: what steps take.
        batching: when requests enter and leave the batch.
        retraction: takes slots for urgent requests.
        growth: gives prompts further pages.

    Attributes:
        budget: prompt tokens of a step.
        sharing: which prompts go first.
        target: bounds the prompt tokens of a step by its time.
        width: largest number of requests that a step admits.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        state: CoreState,
        budget: PrefillBudget,
        costs: StepCostModel,
        batching: ContinuousBatching,
        retraction: Retraction,
        growth: PageGrowth,
    ) -> None:
        self._kv = state.kv
        self._offload = state.offload
        self._admission = state.admission
        self._waiting = state.waiting
        self._running = state.running
        self.budget = budget
        self._batching = batching
        self._retraction = retraction
        self._growth = growth
        self.sharing = PrefillSharing(args, state.kv.page_size, budget.cuts_prompts)
        self.target = StepTarget(args, costs)
        self.width = args.prefill_width
        # What the last step that left requests waiting lacked, and when that was.
        self._lacked = WaitReason.BUDGET
        self._lacked_at = 0.0

    @property
    def has_room(self) -> bool:
        """Whether the next step has slots and token budget to spare, if nothing runs."""
        num_admissible, budget = self._num_admissible(), self.budget.stretched_tokens
        first = self._waiting.first(num_admissible, budget)
        return len(first) < num_admissible and sum(map(self._num_uncached, first)) < budget

    def add_prompts(self, plan: Plan, now: float) -> None:
        """Add prompts under way, and admit requests from the waiting queue."""
        partial = self._running.partial
        if partial:
            first = self._waiting.first(1, self.budget.tokens)
            if self._retraction.preempts:
                self._retraction.preempt_partial(first, plan)
            if partial:
                self._add_first_parts(first, plan)
        budget = self.budget.tokens - plan.batch.num_prompt_tokens
        lacked: WaitReason | None
        if plan.has_retracted:
            lacked = WaitReason.PAGES
        elif budget <= 0 or not self.sharing.may_admit(len(partial)):
            lacked = WaitReason.BUDGET
        else:
            lacked = self._add_waiting(budget, plan, now) if len(self._waiting) else None
        self._add_last_parts(plan)
        self.sharing.end_step(plan.batch, partial.values())
        plan.lacked = lacked
        if lacked is not None:
            self._lacked, self._lacked_at = lacked, now

    def add_alone(self, request: Request, plan: Plan, now: float) -> None:
        """Add a prompt to a step that has no other row. It is admitted if it has no slot."""
        if request.slot >= 0:
            self._add_part(request, self.budget.chunk, plan)
        elif self._admission.can_admit(request, 0):
            self._admit(request, self.budget.chunk, plan, now)

    # --- prompts under way ------------------------------------------------------------------------

    def _add_first_parts(self, waiting: list[Request], plan: Plan) -> None:
        """Add what prompts under way get before those that wait, of which `waiting` is next."""
        partial, budget = self._running.partial, self.budget
        oldest = min(partial.values(), key=age_of)
        alone = self._in_time(budget.tokens, oldest.num_computed_tokens, plan.batch)
        for request, limit in self.sharing.first_parts(partial.values(), alone, budget, waiting):
            if request.seq in partial:  # it may have been retracted for the one before
                self._add_part(request, limit, plan)

    def _add_last_parts(self, plan: Plan) -> None:
        """Add what the step has left for the prompts under way.

        They retract others for it only where the step would be empty.
        """
        batch, partial = plan.batch, self._running.partial
        if not partial:
            return
        is_single = batch.num_prompts <= 1
        left = (self.budget.chunk if is_single else self.budget.tokens) - batch.num_prompt_tokens
        for request in self.sharing.last_parts(partial.values()):
            if left <= 0:
                break
            left -= self._add_part(request, left, plan, is_first=batch.is_empty)

    def _add_part(self, request: Request, limit: int, plan: Plan, is_first: bool = True) -> int:
        """Add the next tokens of a prompt, at most `limit`. Return their number.

        It is 0 where the request waits for a page.

        Args:
            request: has a slot.
            limit: number of tokens that the step has for it.
            plan: the step.
            is_first: others may be retracted for it; else it may have a row in the step.
        """
        batch, running = plan.batch, self._running
        count = request.num_uncomputed_tokens
        if self.budget.cuts_prompts:
            count = self._in_time(min(count, limit), request.num_computed_tokens, batch)
        count = self._growth.grow_prompt(request, count, plan, is_first)
        if count == 0:
            return 0
        samples = (batch.add_prefill if is_first else batch.extend_prefill)(request, count)
        self._kv.cache_computed(request)
        if not samples:
            running.partial[request.seq] = request
            return count
        running.partial.pop(request.seq, None)
        if request.num_remaining_tokens:
            running.add(request)
        else:
            self._batching.stop(request)
        return count

    def _in_time(self, limit: int, context: int, batch: ScheduleBatch) -> int:
        """Return how many of `limit` tokens of a prompt the step can take under --itl-target."""
        return self.target.limit(limit, context, batch, self._running.num_rows)

    # --- the waiting queue ------------------------------------------------------------------------

    def _add_waiting(self, budget: int, plan: Plan, now: float) -> WaitReason | None:
        """Admit prompts from the waiting queue, as far as width, tokens, slots and pages last.

        The pages of each are cached at once, so that the next one may match them: a common prefix
        is computed once, in this very step.

        Returns:
            What the step lacks for the requests that still wait; None if it has admitted all.
        """
        num_admissible = self._num_admissible()
        if num_admissible <= 0:
            return WaitReason.SLOTS
        lacked, offload = None, self._offload
        expected = self._admission.expected_tokens()
        lookahead = self._waiting.lookahead
        num_candidates = num_admissible + lookahead + len(offload.loads) + self.sharing.lookahead
        candidates = self._waiting.first(num_candidates, budget)
        if len(candidates) == len(self._waiting):
            wanted = sum(r.num_uncomputed_tokens for r in candidates)
            budget = self.budget.stretched(budget, wanted)
        for request in candidates:
            if offload.awaits(request):
                lacked = WaitReason.PAGES
                continue
            count = self._num_to_begin(request, budget, plan)
            if count is None:
                lacked = WaitReason.BUDGET
                continue
            if count == 0 or not self._can_admit(request, expected, plan):
                lacked = self._lack_of(count)
                lookahead -= 1
                if lookahead < 0:
                    return lacked
                continue
            if offload.begin_load(request):
                lacked = WaitReason.PAGES
                continue
            self._waiting.take(request)
            expected += self._kv.growth([request], request.num_remaining_tokens)
            budget -= self._admit(request, count, plan, now)
            num_admissible -= 1
            has_budget = budget > 0 and self.sharing.may_admit(len(self._running.partial))
            if num_admissible == 0 or not has_budget:
                return WaitReason.SLOTS if has_budget else WaitReason.BUDGET
        return lacked

    def _num_to_begin(self, request: Request, budget: int, plan: Plan) -> int | None:
        """Return how many of a waiting prompt's tokens the step can take; 0 for none.

        None: it stays behind prompts under way, but others may pass it.
        """
        limits, batch, partial = self.budget, plan.batch, self._running.partial.values()
        num_uncached = self._num_uncached(request)
        num_cached = request.num_known_tokens - num_uncached
        if batch.num_prompts and limits.cuts_prompts:
            budget = self._in_time(budget, num_cached, batch)
        if self.sharing.is_held_back(request, num_uncached, budget, partial):
            return None
        count = limits.num_tokens_for(num_uncached, budget, batch.num_prompts > 0)
        if count and limits.cuts_prompts:
            count = self._in_time(count, num_cached, batch)
        if 0 < count < num_uncached:
            count = self.sharing.first_part(count, budget, len(self._waiting))
        return count

    def _can_admit(self, request: Request, expected: int, plan: Plan) -> bool:
        if self._admission.can_admit(request, expected):
            return True
        if self._retraction.preempts and not self._admission.pending_release:
            self._retraction.preempt_for(request, plan)
        return False

    def _lack_of(self, count: int) -> WaitReason:
        """Return why a request whose next `count` tokens fit into the step is not admitted."""
        if count == 0:
            return WaitReason.BUDGET
        return WaitReason.PAGES if self._admission.num_free_slots else WaitReason.SLOTS

    def _admit(self, request: Request, limit: int, plan: Plan, now: float) -> int:
        """Give slot and pages to a request and add its first tokens. Return their number."""
        if not request.admitted_at and self._lacked_at > request.tokenized_at:
            request.waited_for += (self._lacked,)
        self._admission.admit(request, now)
        plan.admitted.append(request)
        plan.batch.new.append(request.new_slot())
        return self._add_part(request, limit, plan)

    def _num_admissible(self) -> int:
        """Return how many requests this step may admit.

        Without a free slot one is considered for which another may be preempted.
        """
        num_preempted = int(self._retraction.preempts)
        limit = min(self.width, self._admission.num_free_slots or num_preempted)
        return self._batching.num_admissible(limit)

    def _num_uncached(self, request: Request) -> int:
        """Return how many tokens of a waiting request are not cached."""
        return request.num_known_tokens - self._kv.num_cached_tokens(request)
