"""The scheduler core: what the next step runs, and what the result of a step means.

It is pure: no clock, no sockets, no journal, no callbacks. `plan` composes a step out of the
running batch and the waiting queue, `complete` takes a step's tokens in; both return what happened.
"""

from collections.abc import Collection, Iterable
from itertools import repeat

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.worker import StepResult
from scheduler_proc.kv_offload.kv_offload import NoOffload
from scheduler_proc.planning.admission import Admission
from scheduler_proc.planning.guess_policy import make_guess_policy
from scheduler_proc.planning.prefill_budget import PrefillBudget
from scheduler_proc.planning.prefill_sharing import PrefillSharing, age_of
from scheduler_proc.planning.quarantine import Quarantine, push
from scheduler_proc.planning.retraction import Retraction
from scheduler_proc.planning.step_cost import StepCostModel
from scheduler_proc.planning.step_target import StepTarget
from scheduler_proc.policies import make_queue, make_turns
from scheduler_proc.state.batch import RunningBatch, ScheduleBatch
from scheduler_proc.state.kv_cache import PageHolder
from scheduler_proc.state.plan import BatchMode, Capacity, Plan, Room, StepUpdate
from scheduler_proc.state.request import (
    FinishReason,
    Request,
    RequestFailure,
    RequestStatus,
    RetractReason,
    WaitReason,
)
from scheduler_proc.state.window import make_kv_cache


class SchedulerCore:
    """Waiting queue, running batch and KV pages.

    Attributes:
        offload: the KV pages beyond the pool.
    """

    def __init__(self, args: SchedulerArgs, capacity: Capacity, num_retractions: int = 0) -> None:
        self._mode = BatchMode(args.mode)
        self._budget = PrefillBudget(args, capacity)
        self.kv = make_kv_cache(
            capacity.num_pages,
            capacity.page_size,
            capacity.window,
            self._budget.longest,
            prefix_cache=not args.disable_radix_cache,
        )
        self.admission = Admission(args, self.kv)
        self.waiting = make_queue(args, self.kv.match_prefix, capacity.page_size)
        self.quarantine = Quarantine()
        self.sharing = PrefillSharing(args, capacity.page_size, self._budget.cuts_prompts)
        self.costs = StepCostModel()
        self._target = StepTarget(args, self.costs)
        self.guesses = make_guess_policy(args, capacity.step_costs, capacity.draft_costs)
        self.offload = NoOffload()
        self._running = RunningBatch(args.batch_concurrency_beside, make_turns(args))
        self._width = args.max_batch_size
        self._prefill_width = args.prefill_width
        self.retraction = Retraction(
            args,
            self.kv,
            self.admission,
            self._running,
            self.waiting,
            self.quarantine,
            num_retractions,
        )
        self._last_step_prefilled = False
        # What the last step that left requests waiting lacked, and when that was.
        self._lacked = WaitReason.BUDGET
        self._lacked_at = 0.0

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, request: Request) -> RequestFailure | None:
        """Queue a request. Return its error where it can never run."""
        if self.kv.num_pages and self.admission.never_fits(request):
            return request, self.admission.prompt_too_long(request)
        push(request, self.waiting, self.quarantine)
        return None

    def remove(self, request: Request) -> None:
        """Remove a request that ends, wherever it stands. Steps in flight keep its pages."""
        self.waiting.remove(request)
        self.quarantine.remove(request)
        if request in self._running:
            self._stop_decoding(request)
        self._running.remove(request)
        if request.in_flight == 0:
            self._release(request)

    def _release(self, request: Request) -> None:
        """Release slot and pages of a request that has no step in flight."""
        self.admission.release(request)

    # --- plan -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self.waiting) + len(self.quarantine)

    @property
    def num_retractions(self) -> int:
        """Number of retractions since the scheduler has started."""
        return self.retraction.num_retractions

    @property
    def width(self) -> int:
        """Largest number of decode rows of a step."""
        return self._width

    @property
    def prefill_width(self) -> int:
        """Largest number of requests that a step admits."""
        return self._prefill_width

    @property
    def mode(self) -> BatchMode:
        """What a step computes."""
        return self._mode

    @property
    def budget(self) -> PrefillBudget:
        """How many prompt tokens a step computes."""
        return self._budget

    @property
    def target(self) -> StepTarget:
        """How many of them it may compute so that it is in time."""
        return self._target

    @property
    def prefill_budget(self) -> int:
        """Number of prompt tokens that a step computes."""
        return self._budget.tokens

    @property
    def partial_prefills(self) -> Collection[Request]:
        """The requests whose prompts are partly computed."""
        return self._running.partial.values()

    @property
    def num_streams(self) -> int:
        """Number of decode rows of the next step."""
        return min(self._width, self._running.num_active)

    def num_cached(self, request: Request) -> int:
        """Return how many tokens of a waiting request are cached."""
        return self.kv.match_prefix(request).depth * self.kv.page_size

    @property
    def has_work(self) -> bool:
        """Whether a request could use a step."""
        if self.kv.num_pages == 0:
            return False
        running = self._running
        return len(running) > 0 or bool(running.partial) or self.num_waiting > 0

    @property
    def page_holders(self) -> list[PageHolder]:
        """All that hold pages: requests with a slot, and loads of pages."""
        return [*self.admission.holders.values(), *self.offload.loads]

    @property
    def num_loads(self) -> int:
        """Number of loads of pages under way, which hold them."""
        return len(self.offload.loads)

    @property
    def has_room(self) -> bool:
        """Whether nothing runs, and the next prefill step has slots and token budget to spare."""
        if self._running.all_requests or len(self.quarantine):
            return False
        num_admissible, budget = self._num_admissible(), self._budget.stretched_tokens
        first = self.waiting.first(num_admissible, budget)
        return len(first) < num_admissible and sum(map(self._num_uncached, first)) < budget

    def plan(self, now: float, in_flight: bool) -> Plan:
        """Return the next step. in_flight: earlier steps are not answered yet."""
        plan = Plan(in_flight)
        self.kv.release_unseen(self.admission.holders.values())
        self._compose(plan, now)
        while plan.batch.is_empty and plan.has_retracted:
            self._compose(plan, now)
        batch = plan.batch
        self._last_step_prefilled = batch.num_decodes < batch.batch_size
        if batch.num_decodes and not plan.has_retracted:
            self.admission.ratio.decay()
        if self.guesses is not None and batch.num_decodes == batch.batch_size:
            self.guesses.plan(batch, self.kv)
        return plan

    def _compose(self, plan: Plan, now: float) -> None:
        plan.has_retracted = False
        quarantined = self.quarantine.current
        if quarantined is not None:
            self._add_quarantined(quarantined, plan, now)
        elif self._mode is BatchMode.MIXED:
            self._add_decodes(plan)
            self._add_prefills(plan, now)
        elif self._decode_comes_first():
            self._add_decodes(plan)
            if plan.batch.is_empty:
                self._add_prefills(plan, now)
        else:
            self._add_prefills(plan, now)
            if plan.batch.is_empty:
                self._add_decodes(plan)

    def _decode_comes_first(self) -> bool:
        in_turns = self._mode is BatchMode.ALTERNATE or bool(self._running.partial)
        if self._last_step_prefilled and in_turns:
            return True
        return self._mode is BatchMode.DECODE_FIRST and self._running.num_active >= self._width

    def _add_quarantined(self, request: Request, plan: Plan, now: float) -> None:
        """Add a row of one request alone, so that it is known whose step crashes the worker."""
        if request.slot >= 0:
            if request.seq in self._running.partial:
                self._add_prefill(request, self._budget.chunk, plan)
            else:
                self._add_decodes(plan)
            return
        for other in self._running.all_requests:
            self.retraction.retract(other, RetractReason.QUARANTINE, plan)
        if not plan.in_flight and self.admission.can_admit(request, 0):
            self._admit(request, self._budget.chunk, plan, now)

    # --- decode -----------------------------------------------------------------------------------

    def _add_decodes(self, plan: Plan) -> None:
        rows = self._with_pages(self._running.next_group(self._width), plan)
        plan.batch.add_decodes(rows)
        for request in [r for r in rows if r.num_known_tokens == r.max_total_tokens]:
            self._stop_decoding(request)

    def _with_pages(self, group: list[Request], plan: Plan) -> list[Request]:
        """Allocate a page to each request in `group` that needs one, retracting others if needed.

        Return the requests that can decode.
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

    def _append_page(self, request: Request, plan: Plan) -> bool:
        """Append a page to a running request, retracting others if needed. Return whether it is."""
        room = self.retraction.ensure_page(request, plan, self.num_loads > 0)
        if room is Room.FREE:
            self.kv.append_page(request)
        elif room is Room.POOL_FULL:
            plan.failed.append((request, self.admission.pool_is_full(request)))
            plan.has_retracted = True
            self.remove(request)
        return room is Room.FREE

    def _stop_decoding(self, request: Request) -> None:
        """Remove a request from the running batch: it needs no further step."""
        self._running.remove(request)

    # --- prefill ----------------------------------------------------------------------------------

    def _add_prefills(self, plan: Plan, now: float) -> None:
        partial = self._running.partial
        if partial:
            first = self.waiting.first(1, self._budget.tokens)
            if self.retraction.preempts:
                self.retraction.preempt_partial(first, plan)
            if partial:
                self._add_first_parts(first, plan)
        budget = self._budget.tokens - plan.batch.num_prompt_tokens
        lacked: WaitReason | None
        if plan.has_retracted:
            lacked = WaitReason.PAGES
        elif budget <= 0 or not self.sharing.may_admit(len(partial)):
            lacked = WaitReason.BUDGET
        else:
            lacked = self._add_waiting(budget, plan, now) if len(self.waiting) else None
        self._add_last_parts(plan)
        self.sharing.end_step(plan.batch, partial.values())
        plan.lacked = lacked
        if lacked is not None:
            self._lacked, self._lacked_at = lacked, now

    def _add_first_parts(self, waiting: list[Request], plan: Plan) -> None:
        """Add what prompts under way get before those that wait, of which `waiting` is next."""
        partial, budget = self._running.partial, self._budget
        oldest = min(partial.values(), key=age_of)
        alone = self._in_time(budget.tokens, oldest.num_computed_tokens, plan)
        for request, limit in self.sharing.first_parts(partial.values(), alone, budget, waiting):
            if request.seq in partial:  # it may have been retracted for the one before
                self._add_prefill(request, limit, plan)

    def _add_last_parts(self, plan: Plan) -> None:
        """Add what the step has left for the prompts under way.

        They retract others for it only where the step would be empty.
        """
        batch, partial = plan.batch, self._running.partial
        if not partial:
            return
        is_single = batch.num_prompts <= 1
        left = (self._budget.chunk if is_single else self._budget.tokens) - batch.num_prompt_tokens
        for request in self.sharing.last_parts(partial.values()):
            if left <= 0:
                break
            left -= self._add_prefill(request, left, plan, is_first=batch.is_empty)

    def _add_prefill(self, request: Request, limit: int, plan: Plan, is_first: bool = True) -> int:
        """Add the next tokens of a prompt, at most `limit`. Return their number.

        It is 0 where the request waits for a page.

        Args:
            request: has a slot.
            limit: number of tokens that the step has for it.
            plan: the step.
            is_first: others may be retracted for it; else it may have a row in the step.
        """
        count = request.num_uncomputed_tokens
        if self._budget.cuts_prompts:
            count = self._in_time(min(count, limit), request.num_computed_tokens, plan)
        count = self._num_with_pages(request, count, plan, is_first)
        if count == 0:
            return 0
        add = plan.batch.add_prefill if is_first else plan.batch.extend_prefill
        samples = add(request, count)
        self.kv.cache_computed(request)
        if samples:
            self._running.partial.pop(request.seq, None)
        else:
            self._running.partial[request.seq] = request
        if samples and request.num_remaining_tokens:
            self._running.add(request)
        elif samples:
            self._stop_decoding(request)
        return count

    def _in_time(self, limit: int, context: int, plan: Plan) -> int:
        """Return how many of `limit` tokens of a prompt the step can take under --itl-target."""
        return self._target.limit(limit, context, plan.batch, self.num_streams)

    def _num_with_pages(self, request: Request, count: int, plan: Plan, may_retract: bool) -> int:
        """Return how many of the next `count` tokens of a prompt have pages.

        A prompt got all of its pages when it was admitted, unless every layer has a window. Then it
        takes further ones as far as there are any; others are retracted for the first one only.
        """
        room = request.page_capacity - request.num_computed_tokens
        while room < count and ((room == 0 and may_retract) or self.kv.num_available):
            if not self._append_page(request, plan):
                return 0
            plan.batch.grown += (request.slot, request.pages[-1])
            room += self.kv.page_size
        return min(count, room)

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
        lacked = None
        expected = self.admission.expected_tokens()
        lookahead = self.waiting.lookahead
        num_candidates = num_admissible + lookahead + self.num_loads + self.sharing.lookahead
        candidates = self.waiting.first(num_candidates, budget)
        if len(candidates) == len(self.waiting):
            wanted = sum(r.num_uncomputed_tokens for r in candidates)
            budget = self._budget.stretched(budget, wanted)
        for request in candidates:
            if self.offload.awaits(request):
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
            if self.offload.begin_load(request):
                lacked = WaitReason.PAGES
                continue
            self.waiting.take(request)
            expected += self.kv.growth([request], request.num_remaining_tokens)
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
        num_uncached = self._num_uncached(request)
        num_cached = request.num_known_tokens - num_uncached
        if plan.batch.num_prompts and self._budget.cuts_prompts:
            budget = self._in_time(budget, num_cached, plan)
        if self.sharing.is_held_back(request, num_uncached, budget, self._running.partial.values()):
            return None
        count = self._budget.num_tokens_for(num_uncached, budget, plan.batch.num_prompts > 0)
        if count and self._budget.cuts_prompts:
            count = self._in_time(count, num_cached, plan)
        if 0 < count < num_uncached:
            count = self.sharing.first_part(count, budget, len(self.waiting))
        return count

    def _lack_of(self, count: int) -> WaitReason:
        """Return why a request whose next `count` tokens fit into the step is not admitted."""
        if count == 0:
            return WaitReason.BUDGET
        return WaitReason.PAGES if self.admission.num_free_slots else WaitReason.SLOTS

    def _admit(self, request: Request, limit: int, plan: Plan, now: float) -> int:
        """Give slot and pages to a request and add its first tokens. Return their number."""
        if not request.admitted_at and self._lacked_at > request.tokenized_at:
            request.waited_for += (self._lacked,)
        self.admission.admit(request, now)
        plan.admitted.append(request)
        plan.batch.new.append(request.new_slot())
        if self.guesses is not None:
            plan.batch.groups.append(self.guesses.group_of(request))
        return self._add_prefill(request, limit, plan)

    def _can_admit(self, request: Request, expected: int, plan: Plan) -> bool:
        if self.admission.can_admit(request, expected):
            return True
        if self.retraction.preempts and not self.admission.pending_release:
            self.retraction.preempt_for(request, plan)
        return False

    def _num_admissible(self) -> int:
        """Return how many requests this step may admit.

        Without a free slot one is considered for which another may be preempted.
        """
        num_preempted = int(self.retraction.preempts)
        return min(self._prefill_width, self.admission.num_free_slots or num_preempted)

    def _num_uncached(self, request: Request) -> int:
        """Return how many tokens of a waiting request are not cached."""
        return request.num_known_tokens - self.num_cached(request)

    # --- complete ---------------------------------------------------------------------------------

    def complete(self, batch: ScheduleBatch, result: StepResult) -> StepUpdate:
        """Take in the result of a step and return what it brought."""
        requests, update = batch.requests, StepUpdate()
        self.costs.observe(batch, result.ended - result.began)
        for piece in result.prompt_logprobs:
            requests[piece.row].prompt_logprobs.append(piece.block)
        for request in requests:
            request.in_flight -= 1
        token_ids = unpack_ids(result.token_ids)
        self._take_tokens(zip(requests, token_ids, strict=True), result.ended, update)
        for guessed in result.guessed:
            further = unpack_ids(guessed.token_ids)
            requests[guessed.row].extend_guessed(len(further))
            self._take_further(requests[guessed.row], further, result.ended, update)
        for row in result.forced:
            forced = unpack_ids(row.token_ids)
            requests[row.row].extend_forced(len(forced))
            self._take_further(requests[row.row], forced, result.ended, update)
        if self.guesses is not None:
            self.guesses.observe(batch, result)
        for request in requests:
            if request.in_flight == 0 and request.status >= RequestStatus.RETRACTED:
                if request.status is RequestStatus.RETRACTED:
                    self.retraction.requeue(request, update.failed)
                else:
                    self._release(request)
        return update

    def _take_further(
        self, request: Request, token_ids: Iterable[int], time: float, update: StepUpdate
    ) -> None:
        """Append tokens that follow the one that a row sampled."""
        if request.num_remaining_tokens <= 0 and request in self._running:
            self._stop_decoding(request)
        self._take_tokens(zip(repeat(request), token_ids), time, update)

    def _take_tokens(
        self, tokens: Iterable[tuple[Request, int]], time: float, update: StepUpdate
    ) -> None:
        """Append each request's next token; -1 where the step sampled none."""
        seqs, token_ids = update.seqs, update.token_ids
        for request, token in tokens:
            if token < 0 or request.finish_reason:
                continue
            if not request.first_token_at:
                request.first_token_at = time
                if request.status is RequestStatus.PREFILLING:
                    request.status = RequestStatus.DECODING
                update.started.append(request)
            known = request.tokens
            known.append(token)
            seqs.append(request.seq)
            token_ids.append(token)
            if token in request.stop_ids:
                self._finish(request, FinishReason.STOP, token, update)
            elif len(known) == request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH, None, update)

    def _finish(
        self, request: Request, reason: FinishReason, matched_stop: int | None, update: StepUpdate
    ) -> None:
        self.remove(request)
        request.finish(reason, matched_stop)
        update.finished.append(request)
