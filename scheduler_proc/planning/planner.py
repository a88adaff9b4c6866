"""What the next step runs: which requests decode, whose prompts are computed, who must give way."""

from collections.abc import Callable

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import QuadrigaError
from scheduler_proc.planning.admission import Admission
from scheduler_proc.planning.deadlines import Deadlines
from scheduler_proc.planning.quarantine import Quarantine, is_quarantined
from scheduler_proc.planning.retraction import Retractor
from scheduler_proc.planning.static_batching import StaticBatchPadding
from scheduler_proc.policies.base import WaitingQueue
from scheduler_proc.state.batch import RunningBatch, ScheduleBatch, new_slot
from scheduler_proc.state.request import Request


class Planner:
    """Composes steps out of the running batch and the waiting queue, by the batch mode:

    prefill-first: prompts before anything else; after a chunk, however, the running ones have a
        step, so that a long prompt never stops them for longer than one chunk.
    mixed: each step decodes and computes prompts, as many as the token budget allows.
    decode-first: prompts only as long as one decode step is not full.
    alternate: one step of prompts, then one decode step.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        prefill_tokens: int,
        admission: Admission,
        waiting: WaitingQueue,
        deadlines: Deadlines,
        fail: Callable[[Request, QuadrigaError], None],
    ) -> None:
        self._args = args
        self._mode = args.mode
        self._budget = args.prefill_budget(prefill_tokens)
        self._slack = args.prefill_slack(prefill_tokens)
        self._chunk = args.longest_chunk(prefill_tokens)
        self._cuts = args.chunk_size(prefill_tokens) is not None
        self._width = args.max_batch_size
        self._static = args.batching == "static"
        self.admission = admission
        self._kv = admission.kv
        self.waiting = waiting
        self._running = RunningBatch()
        self._deadlines = deadlines
        self._prefilled_last = False
        self._filling = True
        self._padding = StaticBatchPadding(admission)
        self.trial = Quarantine()
        self.giving_way = Retractor(args, admission, self._running, self._padding, self.push, fail)

    # --- composing --------------------------------------------------------------------------------

    def next_batch(self, now: float, in_flight: bool) -> ScheduleBatch:
        """The next step; empty where nothing can run. in_flight: earlier ones are not answered."""
        self.giving_way.in_flight = in_flight
        batch = self._compose(now)
        while batch.is_empty and self.giving_way.happened:
            batch = self._compose(now)
        self._prefilled_last = batch.num_decodes < batch.batch_size
        if batch.num_decodes:
            self._filling = False
            if not self.giving_way.happened:
                self.admission.ratio.step_went_well()
        return batch

    def _compose(self, now: float) -> ScheduleBatch:
        self.giving_way.happened = False
        if not self._running and self._running.chunked is None:
            self._padding.end()
        suspect = self.trial.current
        if suspect is not None:
            return self._compose_trial(suspect, now)
        batch = ScheduleBatch()
        if self._mode == "mixed":
            self._add_decodes(batch)
            self._add_prefills(batch, now)
        elif self._decode_has_the_turn():
            self._add_decodes(batch)
            if batch.is_empty:
                self._add_prefills(batch, now)
        else:
            self._add_prefills(batch, now)
            if batch.is_empty:
                self._add_decodes(batch)
        return batch

    def _compose_trial(self, suspect: Request, now: float) -> ScheduleBatch:
        """A step of one request and nobody else, so that it is known whose step ends the worker."""
        batch = ScheduleBatch()
        if suspect.slot >= 0:
            if self._running.chunked is suspect:
                self._add_prefill(batch, suspect, self._chunk)
            else:
                self._add_decodes(batch)
            return batch
        self._padding.end()
        for other in self._running.everybody:
            self.giving_way.retract(other)
        if not self.giving_way.in_flight and self.admission.fits(suspect, 0):
            self._deadlines.admitted(suspect)
            self.admission.seat(suspect, now)
            batch.new.append(new_slot(suspect))
            self._add_prefill(batch, suspect, self._chunk)
        return batch

    @property
    def has_work(self) -> bool:
        """Somebody could use a step."""
        somebody = len(self._running) + len(self.waiting) + len(self._padding) + len(self.trial)
        return somebody > 0 or self._running.chunked is not None

    @property
    def has_room(self) -> bool:
        """Nobody would be in the next step but those who wait, and it could take more of them."""
        if len(self._running.everybody) + len(self.trial) + len(self._padding):
            return False
        places, budget = self._places(), self._budget + self._slack
        first = self.waiting.first(places, budget)
        return len(first) < places and sum(map(self._to_compute, first)) < budget

    def _decode_has_the_turn(self) -> bool:
        in_turns = self._mode == "alternate" or self._running.chunked is not None
        if self._prefilled_last and in_turns:
            return True
        return self._mode == "decode-first" and len(self._running) >= self._width

    def _add_decodes(self, batch: ScheduleBatch) -> None:
        padding = self._padding.rows()
        rows = self._with_room(self._running.next_group(self._width), batch)
        batch.add_decodes(rows)
        for request in [one for one in rows if one.known == one.most_known]:
            self._stop_decoding(request)
        if rows:
            self._padding.add_rows(batch, padding)

    def _with_room(self, group: list[Request], batch: ScheduleBatch) -> list[Request]:
        """Those of a group who have a page for their next token, once all were given one for whom
        there is one."""
        full = [request for request in group if request.computed == request.capacity]
        if not full:
            return group
        for request in full:
            if request in self._running and self.giving_way.make_room(request):
                self._kv.grow(request)
        rows = [one for one in group if one.computed < one.capacity]
        if self.giving_way.happened:
            rows = [one for one in rows if one in self._running]
        for request in full:
            if request.computed < request.capacity and request in self._running:
                batch.grown += (request.slot, request.pages[-1])
        return rows

    def jump(self, request: Request, count: int) -> None:
        """So many tokens follow the one that was sampled, and need no step each."""
        request.jump(count)
        if request.num_remaining_tokens <= 0 and request in self._running:
            self._stop_decoding(request)

    def _stop_decoding(self, request: Request) -> None:
        self._running.remove(request)
        if self._static:
            self._padding.add(request)

    def _add_prefills(self, batch: ScheduleBatch, now: float) -> None:
        budget = self._budget
        if self._running.chunked is not None and self.giving_way.preempts:
            self.giving_way.chunked_to(self.waiting.first(1, budget))
        if self._running.chunked is not None:
            budget -= self._add_prefill(batch, self._running.chunked, self._chunk)
        if budget > 0 and len(self.waiting) and not self.giving_way.happened:
            self._admit(batch, budget, now)

    def _stretched(self, budget: int, wanted: int) -> int:
        """Enough for all that is wanted, where that is little more than the budget."""
        return wanted if budget < wanted <= budget + self._slack else budget

    def _add_prefill(self, batch: ScheduleBatch, request: Request, most: int) -> int:
        """The next tokens of a prompt, at most so many; how many."""
        count = (
            min(request.num_uncomputed_tokens, most)
            if self._cuts
            else request.num_uncomputed_tokens
        )
        samples = batch.add_prefill(request, count)
        self._kv.cache_computed(request)
        self._running.chunked = None if samples else request
        if samples and request.num_remaining_tokens:
            self._running.merge(request)
        elif samples:
            self._stop_decoding(request)
        return count

    # --- admission --------------------------------------------------------------------------------

    def _admit(self, batch: ScheduleBatch, budget: int, now: float) -> None:
        """Prompts out of the waiting queue, while width, tokens, slots and pages last.

        The pages of each are shared at once, so that the next one may find its prefix there: it
        is computed once, in this very step.
        """
        places = self._places()
        if places <= 0:
            return
        expected = self.admission.expected_tokens()
        lookahead = self.waiting.lookahead
        candidates = self.waiting.first(places + lookahead, budget)
        if len(candidates) == len(self.waiting):
            budget = self._stretched(
                budget, sum(request.num_uncomputed_tokens for request in candidates)
            )
        for request in candidates:
            count = self._tokens_for(request, batch, budget)
            if count == 0 or not self._fits(request, expected):
                lookahead -= 1
                if lookahead < 0:
                    return
                continue
            self.waiting.take(request)
            self._deadlines.admitted(request)
            self.admission.seat(request, now)
            batch.new.append(new_slot(request))
            expected += request.num_remaining_tokens
            budget -= self._add_prefill(batch, request, count)
            places -= 1
            if places == 0 or budget <= 0 or self._running.chunked is not None:
                return

    def _places(self) -> int:
        """How many requests this step may admit; without a free slot, one is looked at for whom
        another may have to give way."""
        free = self.admission.num_free_slots or int(self.giving_way.preempts)
        if not self._static:
            return min(self._args.prefill_width, free)
        seated = len(self.admission.seated)
        if seated == 0:
            self._filling = True
        return min(self._args.prefill_width, self._width - seated, free) if self._filling else 0

    def _tokens_for(self, request: Request, batch: ScheduleBatch, budget: int) -> int:
        """How many tokens of a waiting prompt this step can take; 0: none.

        The first prompt of a step is cut to the longest chunk, or goes alone where prompts are
        never cut; those after it are cut where a page ends.
        """
        page_size, num_uncomputed_tokens = self._kv.page_size, self._to_compute(request)
        if num_uncomputed_tokens <= budget:
            return num_uncomputed_tokens
        if batch.batch_size == batch.num_decodes:
            return min(num_uncomputed_tokens, self._chunk) if self._cuts else num_uncomputed_tokens
        return budget // page_size * page_size if self._cuts else 0

    def _to_compute(self, request: Request) -> int:
        """Tokens of a waiting prompt that are not cached."""
        return request.known - self._kv.locate(request).depth * self._kv.page_size

    def _fits(self, request: Request, expected: int) -> bool:
        if self.admission.fits(request, expected):
            return True
        if self.giving_way.preempts and not self.admission.leaving:
            self.giving_way.one_to(request)
        return False

    # --- coming and going -------------------------------------------------------------------------

    def push(self, request: Request) -> None:
        """A request that arrived, or has to wait again."""
        if is_quarantined(request):
            self.trial.push(request)
        else:
            self.waiting.push(request)

    def forget(self, request: Request) -> None:
        """It has ended, wherever it stood."""
        self.waiting.remove(request)
        self.trial.remove(request)
        if request in self._running:
            self._stop_decoding(request)
        self._running.remove(request)

    def release(self, request: Request) -> None:
        """It has ended, and no step of it is in flight. Its pages come back, unless it pads."""
        if request not in self._padding:
            self.admission.release(request)

    def retract_one(self, number: int) -> None:
        """See Scheduler.retract_one. Who is tried alone stays alone."""
        running = list(self._running)
        if running and self.trial.current is None:
            self.giving_way.retract(running[number % len(running)])
