"""The scheduler core: what the next step runs, and what the result of a step means.

`StepCompletion` applies the result of a step to its requests; `SchedulerCore` plans steps and
completes them.
"""

from collections.abc import Iterable
from itertools import repeat

from quadriga.server.config.engine_args import SchedulerArgs
from quadriga.wire.packing import unpack_ids
from quadriga.wire.worker import StepResult
from scheduler_proc.planning import admission, fairness, prefill, speculation, step_cost
from scheduler_proc.planning.batching import Batching, make_batching
from scheduler_proc.planning.retraction import PageGrowth, Retraction
from scheduler_proc.state import kv_cache, kv_offload, pins, window
from scheduler_proc.state.batch import (
    BatchMode,
    Capacity,
    Plan,
    RunningBatch,
    ScheduleBatch,
    StepUpdate,
)
from scheduler_proc.state.request import (
    FinishReason,
    Request,
    RequestFailure,
    RequestStatus,
    RetractReason,
)


class StepCompletion:
    """Append the tokens of steps to their requests, and end those that are complete.

    Args:
        running: the requests that decode.
        batching: how requests leave.
        retraction: queues retracted requests again.
        kv: the KV pages.
    """

    def __init__(
        self,
        running: RunningBatch,
        batching: Batching,
        retraction: Retraction,
        kv: kv_cache.KVCache,
    ) -> None:
        self._running = running
        self._batching = batching
        self._retraction = retraction
        self._kv = kv

    def complete(self, batch: ScheduleBatch, result: StepResult) -> StepUpdate:
        """Take in the result of a step and return what it brought.

        A request whose last step in flight it was, and that has ended or was retracted, gives back
        slot and pages.
        """
        requests, update = batch.requests, StepUpdate()
        for piece in result.prompt_logprobs:
            requests[piece.row].prompt_logprobs.append(piece.block)
        for nonfinite in result.nonfinite:
            self._kv.withdraw(requests[nonfinite.row], nonfinite.position)
        for request in requests:
            request.in_flight -= 1
        token_ids = unpack_ids(result.token_ids)
        self._take_tokens(zip(requests, token_ids, strict=True), result.ended, update)
        for row in result.vectors:
            self._take_vector(requests[row.row], row.vector, result.ended, update)
        for guessed in result.guessed:
            further = unpack_ids(guessed.token_ids)
            requests[guessed.row].extend_guessed(len(further))
            self._take_further(requests[guessed.row], further, result.ended, update)
        for forced in result.forced:
            further = unpack_ids(forced.token_ids)
            requests[forced.row].extend_forced(len(further))
            self._take_further(requests[forced.row], further, result.ended, update)
        for request in requests:
            if request.in_flight == 0 and request.status >= RequestStatus.RETRACTED:
                if request.status is RequestStatus.RETRACTED:
                    self._retraction.requeue(request, update.failed)
                else:
                    self._batching.release(request)
        return update

    def _take_further(
        self, request: Request, token_ids: Iterable[int], time: float, update: StepUpdate
    ) -> None:
        """Append tokens that follow the one that a row sampled."""
        if request.num_remaining_tokens <= 0 and request in self._running:
            self._batching.leave(request)
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

    def _take_vector(
        self, request: Request, vector: bytes, time: float, update: StepUpdate
    ) -> None:
        """End a request whose answer is a vector."""
        if not request.finish_reason:
            request.first_token_at, request.vector = time, vector
            self._finish(request, FinishReason.STOP, None, update)

    def _finish(
        self, request: Request, reason: FinishReason, matched_stop: int | None, update: StepUpdate
    ) -> None:
        self._batching.remove(request)
        request.finish(reason, matched_stop)
        update.finished.append(request)


class SchedulerCore:
    """Waiting queue, running batch and KV pages.

    It is pure: no clock, no sockets, no journal, no callbacks. `plan` composes a step out of the
    running batch and the waiting queue, `complete` takes a step's tokens in; both return what
    happened. Its parts work on one `CoreState`, and call only parts above them:

    - `Batching`: when requests leave the running batch, and when others enter it;
    - `Retraction`: which running requests give up slot and pages;
    - `PageGrowth`: how a running request gets its next page;
    - `PrefillPlanner`: which prompts a step computes, and how many tokens of each;
    - `StepCompletion`: what the result of a step means for each request.

    Args:
        args: the scheduler's flags.
        capacity: what the worker has room for.
        costs: the expected seconds of steps.
        num_retractions: those before this core was made.
        offload_stats: counters of the KV pages beyond the pool.
        pin_stats: counters of the pins.

    Attributes:
        mode: what a step computes.
        kv: the KV pages.
        offload: those beyond the pool.
        admission: the slots, and which requests hold slot and pages.
        waiting: the requests that wait, in the order of the policy.
        quarantine: the requests that run alone.
        running: the requests that decode, and those whose prompts are partly computed.
        retraction: takes slot and pages from running requests.
        prefill: the prompts of a step.
        costs: the expected seconds of steps.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        capacity: Capacity,
        costs: step_cost.StepCosts,
        num_retractions: int,
        offload_stats: kv_offload.OffloadStats,
        pin_stats: pins.PinStats,
    ) -> None:
        self.mode = BatchMode(args.mode)
        budget = prefill.PrefillBudget(args, capacity)
        self.kv = kv = window.make_kv_cache(
            capacity.num_pages,
            capacity.page_size,
            capacity.window,
            budget.longest,
            prefix_cache=not (args.disable_radix_cache or capacity.is_encoder),
            limits=kv_cache.PinLimits(args.cache_pin_fraction, pin_stats),
        )
        self.offload: kv_offload.KVOffload = kv_offload.NoOffload()
        if not capacity.tiers.are_none:
            self.offload = kv_offload.TieredOffload(kv, capacity.tiers, offload_stats)
        waiting = fairness.make_queue(args, kv.match_prefix, kv.page_size)
        self._state = state = admission.CoreState(
            args, kv, self.offload, waiting, fairness.make_turns(args)
        )
        self.admission = state.admission
        self.waiting = state.waiting
        self.quarantine = state.quarantine
        self.running = state.running
        self.costs = costs
        self._guesses = speculation.make_guess_policy(
            args, capacity.can_guess, capacity.draft_costs
        )
        self._batching = batching = make_batching(args, state)
        self.retraction = retraction = Retraction(args, state, num_retractions)
        self._growth = growth = PageGrowth(state, batching, retraction)
        parts = prefill.CoreParts(state, batching, retraction, growth)
        self.prefill = prefill.PrefillPlanner(args, parts, kv.page_size, budget, self.costs)
        self._completion = StepCompletion(state.running, batching, retraction, kv)
        self._last_step_prefilled = False

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, request: Request) -> RequestFailure | None:
        """Queue a request. Return its error where it can never run."""
        if self.kv.num_pages and self.admission.never_fits(request):
            return request, self.admission.prompt_too_long(request)
        self._state.queue(request)
        return None

    def remove(self, request: Request) -> None:
        """Remove a request that ends, wherever it stands. Steps in flight keep its pages."""
        self._batching.remove(request)

    # --- plan -------------------------------------------------------------------------------------

    def plan(self, now: float, in_flight: bool) -> Plan:
        """Return the next step. in_flight: earlier steps are not answered yet."""
        plan = Plan(in_flight)
        self.kv.pins.advance(now)
        self.kv.release_unseen(self.admission.holders.values())
        self._compose(plan, now)
        # A retraction without a row may have made room for others.
        while plan.batch.is_empty and plan.has_retracted:
            self._compose(plan, now)
        batch = plan.batch
        self._last_step_prefilled = batch.num_prompts > 0
        if batch.num_decodes and not plan.has_retracted:
            self.admission.ratio.decay()
        if self._guesses is not None:
            batch.groups = [self._guesses.group_of(request) for request in plan.admitted]
            if batch.num_prompts == 0:
                self._guesses.plan(batch, self.kv)
        return plan

    def _compose(self, plan: Plan, now: float) -> None:
        """Add rows to an empty step, in the order of the batch mode."""
        plan.has_retracted = False
        if self.running.is_empty:
            self._batching.end_batch()
        quarantined = self.quarantine.current
        if quarantined is not None:
            self._add_quarantined(quarantined, plan, now)
        elif self.mode is BatchMode.MIXED:
            self._add_decodes(plan)
            self.prefill.add_prompts(plan, now)
        elif self._decode_comes_first():
            self._add_decodes(plan)
            if plan.batch.is_empty:
                self.prefill.add_prompts(plan, now)
        else:
            self.prefill.add_prompts(plan, now)
            if plan.batch.is_empty:
                self._add_decodes(plan)

    def _decode_comes_first(self) -> bool:
        """Return whether a step that is not mixed decodes, if there is anything to decode."""
        running = self.running
        in_turns = self.mode is BatchMode.ALTERNATE or bool(running.partial)
        if self._last_step_prefilled and in_turns:
            return True
        return not self.mode.admits(running.num_active, running.width)

    def _add_quarantined(self, request: Request, plan: Plan, now: float) -> None:
        """Add a row of one request alone, so that it is known whose step crashes the worker."""
        if request.slot < 0:
            self._batching.end_batch()
            for other in self.running.all_requests:
                self.retraction.retract(other, RetractReason.QUARANTINE, plan)
            if not plan.in_flight:
                self.prefill.add_alone(request, plan, now)
        elif request.seq in self.running.partial:
            self.prefill.add_alone(request, plan, now)
        else:
            self._add_decodes(plan)

    def _add_decodes(self, plan: Plan) -> None:
        """Add rows of the requests whose turn it is, as far as they have pages."""
        rows = self._growth.grow_decodes(self.running.next_group(), plan)
        if not rows:
            return
        plan.batch.add_decodes(rows)
        self._batching.add_rows(plan.batch)
        for request in [r for r in rows if r.num_known_tokens == r.max_total_tokens]:
            self._batching.leave(request)

    def suspend(self) -> Plan:
        """Retract every running request, of which no step may be in flight.

        Their pages go into the prefix tree, and so to the tiers beyond the pool.

        Returns:
            An empty plan, with what was retracted and what has failed.
        """
        plan = Plan(in_flight=False)
        self._batching.end_batch()
        for request in self.running.all_requests:
            self.retraction.retract(request, RetractReason.SUSPENSION, plan)
        return plan

    # --- complete ---------------------------------------------------------------------------------

    def complete(self, batch: ScheduleBatch, result: StepResult) -> StepUpdate:
        """Take in the result of a step and return what it brought."""
        update = self._completion.complete(batch, result)
        if self._guesses is not None:
            self._guesses.observe(batch, result)
        return update

    # --- gauges -----------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self.waiting) + len(self.quarantine)

    @property
    def num_retractions(self) -> int:
        """Number of retractions since the scheduler has started."""
        return self.retraction.num_retractions

    @property
    def has_work(self) -> bool:
        """Whether a request could use a step, or ended ones hold slots and pages."""
        if self.kv.num_pages == 0:
            return False
        return not self.running.is_empty or self.num_waiting > 0 or self._batching.holds_slots

    @property
    def has_room(self) -> bool:
        """Whether nothing runs, and the next prefill step has slots and token budget to spare."""
        is_idle = self.running.is_empty and not len(self.quarantine)
        return is_idle and not self._batching.holds_slots and self.prefill.has_room

    @property
    def page_holders(self) -> list[kv_cache.PageHolder]:
        """All that hold pages: requests with a slot, and loads of pages."""
        return [*self.admission.holders.values(), *self.offload.loads]
