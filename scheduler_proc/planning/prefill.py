"""The prompts of a step: which requests are admitted, and how many tokens each prompt gets.

In this order: the prompt tokens of a step (`PrefillBudget`), how prompts share them
(`PrefillSharing`), the bound of --itl-target (`StepTarget`), the requests, slots and pages that the
planner decides by (`PlanParts`), and the planner that adds prompts to a step (`PrefillPlanner`).
"""

import copy
from collections.abc import Collection, Iterable
from typing import Protocol

from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.planning import admission, policies, step_cost
from scheduler_proc.planning.batching import Batching
from scheduler_proc.planning.retraction import PageGrowth, Retraction
from scheduler_proc.state.batch import Capacity, Plan, ScheduleBatch
from scheduler_proc.state.kv_offload import KVOffload
from scheduler_proc.state.request import Request, WaitReason


class PrefillBudget:
    """The prompt tokens of a step.

    Attributes:
        tokens: number of prompt tokens that a step computes.
        stretched_tokens: the number for a step that computes all prompts there are with it.
        chunk: longest part of one prompt in a step.
        cuts_prompts: prompts may be computed in parts.
        longest: largest number of tokens of a prompt in a step; 0: no limit.
    """

    def __init__(self, args: SchedulerArgs, capacity: Capacity) -> None:
        self.tokens = args.prefill_budget(capacity.prefill_tokens)
        self.stretched_tokens = self.tokens + args.prefill_slack(capacity.prefill_tokens)
        self.chunk = args.longest_chunk(capacity.prefill_tokens)
        self.cuts_prompts = args.chunk_size(capacity.prefill_tokens) is not None
        self.longest = max(self.stretched_tokens, self.chunk) if self.cuts_prompts else 0
        self._page_size = capacity.page_size

    def stretched(self, budget: int, wanted: int) -> int:
        """Return a budget for all that is wanted, where that is little more than the budget."""
        slack = self.stretched_tokens - self.tokens
        return wanted if budget < wanted <= budget + slack else budget

    def num_tokens_for(self, uncached: int, budget: int, has_prefills: bool) -> int:
        """Return how many of a waiting prompt's uncached tokens a step can take; 0 for none.

        The first prompt of a step is cut to the longest chunk, or goes alone where prompts are not
        cut; later ones are cut where a page ends.

        Args:
            uncached: number of tokens to compute.
            budget: number of tokens that are left for prompts.
            has_prefills: the step has other prompts.
        """
        if uncached <= budget:
            return uncached
        if not has_prefills:
            return min(uncached, self.chunk) if self.cuts_prompts else uncached
        return budget // self._page_size * self._page_size if self.cuts_prompts else 0


# How the prompts that are under way, and those that wait, share the prompt tokens of a step.
#
# The rule is shortest remaining processing time with a reserved share. A step's tokens go to
# short prompts first, so that they pass a long one: of all orders this has the smallest mean time
# to the first token (Schrage, 1968), and the lengths of prompts are known. Alone it would starve
# the long ones. So the prompt that is under way for longest has OLDEST_SHARE of the steps,
# whatever arrives: it takes at most 1 / OLDEST_SHARE times as long as without others. What it had
# beyond its share, of at most MAX_LEAD_STEPS steps, newcomers may take at once: a few of them
# have a whole step. What one side leaves, the other has, so that no step is smaller than without
# sharing.
#
# A prompt passes those that arrived before it only if fewer tokens of it are left. Two long
# prompts are therefore not computed in turns, which would delay the first and help neither. A
# prompt whose next tokens another one is about to compute waits for them instead of computing
# them again.

OLDEST_SHARE = 0.5  # of the prompt tokens
MAX_LEAD_STEPS = 2.0
MIN_DIVIDED_TOKENS = 32  # a step of fewer prompt tokens goes to one prompt
# Requests of the queue that are looked at beyond those which a step may admit.
NUM_LOOKED_AT = 32
# A prompt waits for common tokens that are so many of those that it would have to compute.
MIN_COMMON_SHARE = 0.5


class PrefillSharing:
    """Decide which prompts may begin beside others, and what each gets of a step.

    Args:
        args: the scheduler's flags.
        page_size: number of tokens in a page.
        cuts_prompts: prompts may be computed in parts.

    Attributes:
        lookahead: number of requests of the queue to look at beyond those which may be admitted.
    """

    def __init__(self, args: SchedulerArgs, page_size: int, cuts_prompts: bool) -> None:
        self._max_partial = args.max_num_partial_prefills if cuts_prompts else 1
        self._by_priority = args.schedule_policy == "priority"
        self._caches_prefixes = not args.disable_radix_cache
        self._page_size = page_size
        self._oldest: int | None = None  # its number
        self._alone = 0
        self._lead = 0.0  # steps that the oldest has had beyond its share
        self.lookahead = NUM_LOOKED_AT if self._max_partial > 1 else 0

    def may_admit(self, num_partial: int) -> bool:
        """Return whether requests are admitted beside so many whose prompts are partly computed."""
        return num_partial == 0 or self._max_partial > 1

    def first_parts(
        self,
        partial: Collection[Request],
        alone: int,
        budget: PrefillBudget,
        waiting: list[Request],
    ) -> list[tuple[Request, int]]:
        """Return what prompts under way get before others, in tokens.

        These are the reserved share of the oldest, and all that is left of those which are short.
        While more urgent requests wait, a prompt has no share.

        Args:
            partial: the requests whose prompts are partly computed.
            alone: prompt tokens that the step could compute of the oldest.
            budget: prompt tokens of a step.
            waiting: the next request of the queue, if any.
        """
        oldest = min(partial, key=age_of)
        if self._oldest != oldest.seq:
            self._oldest, self._lead = oldest.seq, 0.0
        self._alone = alone
        if len(partial) == 1 and not (waiting and self._max_partial > 1):
            return [(oldest, budget.chunk)]
        rank = max(self._rank(request) for request in (*partial, *waiting))
        parts: list[tuple[Request, int]] = []
        for request in sorted(partial, key=age_of):
            left = request.num_uncomputed_tokens
            if self._rank(request) < rank:
                continue
            if request is oldest and left > alone:
                parts.append((request, self._share_of_oldest(alone, budget.tokens)))
            elif left <= budget.tokens:
                parts.append((request, left))
        return parts

    def _share_of_oldest(self, alone: int, budget: int) -> int:
        """Return how many of the tokens that a step could compute of the oldest prompt it has.

        A step that the target makes too small to be divided is the oldest's or that of the others.
        """
        if alone < min(budget, MIN_DIVIDED_TOKENS):
            return 0 if self._lead else alone
        return round(max(0.0, OLDEST_SHARE - self._lead) * alone)

    def end_step(self, batch: ScheduleBatch, partial: Collection[Request]) -> None:
        """Take in what the oldest prompt under way has got of a step."""
        oldest = self._oldest
        if oldest is None or not batch.num_prompts:
            return
        first = batch.num_decodes
        rows = zip(batch.requests[first:], batch.num_tokens[first:], strict=True)
        count = sum(count for request, count in rows if request.seq == oldest)
        lead = self._lead + count / max(self._alone, 1) - OLDEST_SHARE
        self._lead = min(max(lead, 0.0), MAX_LEAD_STEPS)
        if all(request.seq != oldest for request in partial):
            self._oldest = None

    def last_parts(self, partial: Iterable[Request]) -> list[Request]:
        """Return prompts under way in the order in which they get what others have left."""
        if self._max_partial == 1:
            return []
        return sorted(partial, key=lambda r: (-self._rank(r), r.num_uncomputed_tokens, age_of(r)))

    def first_part(self, count: int, budget: int, waiting: int) -> int:
        """Return how many tokens a prompt gets that the step cannot end.

        Args:
            count: number of its tokens that the step could compute.
            budget: number of tokens that are left for prompts.
            waiting: number of requests in the queue, itself included.
        """
        if self._max_partial == 1 or waiting == 1:
            return count
        share = int(OLDEST_SHARE * budget) // self._page_size * self._page_size
        return min(count, max(share, self._page_size))

    def is_held_back(
        self, request: Request, num_uncached: int, budget: int, partial: Collection[Request]
    ) -> bool:
        """Return whether a waiting request stays behind prompts that are partly computed.

        Args:
            request: it waits.
            num_uncached: number of its tokens that are not cached.
            budget: number of tokens that are left for prompts.
            partial: the requests whose prompts are partly computed.
        """
        if self._max_partial == 1 or not partial:
            return False
        return self.is_full(num_uncached, budget, len(partial)) or any(
            self.goes_first(other, request, num_uncached) for other in partial
        )

    def is_full(self, num_uncached: int, budget: int, num_partial: int) -> bool:
        """Return whether a prompt would be cut beside as many that are as there may be."""
        return num_uncached > budget and 1 < self._max_partial <= num_partial

    def goes_first(self, other: Request, request: Request, num_uncached: int) -> bool:
        """Return whether a partly computed prompt goes before a waiting request."""
        if self._rank(other) != self._rank(request):
            return self._rank(other) > self._rank(request)
        if self._caches_prefixes and _computes_beginning(other, request, num_uncached):
            return True
        is_older = age_of(other) <= age_of(request)
        return is_older and other.num_uncomputed_tokens <= num_uncached

    def _rank(self, request: Request) -> int:
        """Return the priority as far as it counts: without the policy, only the background does."""
        return request.priority if self._by_priority else -int(request.is_background)


def age_of(request: Request) -> tuple[float, int]:
    """Return what orders requests by age: when their first tokens are due, then their arrival."""
    return request.due_at, request.seq


def _computes_beginning(other: Request, request: Request, num_uncached: int) -> bool:
    """Return whether `other` is about to compute most of a waiting request's uncached tokens."""
    if request.computes_all or other.cache_salt != request.cache_salt:
        return False
    start = request.num_known_tokens - num_uncached
    end = start + max(int(MIN_COMMON_SHARE * num_uncached), 1)
    if end > len(other.tokens) or other.tokens[start] != request.tokens[start]:
        return False
    return other.tokens[:end].tobytes() == request.tokens[:end].tobytes()


# --itl-target: how many prompt tokens a step may compute so that it is expected to be in time.
#
# A running stream gets a token with each step, so that a step's time is its inter-token latency
# (ITL). A newcomer waits for the step that runs, too. So the target bounds all steps with
# prompts, as far as `StepCosts` can tell; the first step with prompts has no bound.
#
# A replica that computes prompts for others has no streams that the target is meant for. There a
# step is long enough that the part which every step takes, such as to read the weights, is small:
# with a target hardly longer than that part, half of the time would be spent on it.

# Aimed at, of the target: measured steps lie around the expected ones.
AIM = 0.9
# A step computes so many prompt tokens even if its decode rows alone take longer than the target.
MIN_PROMPT_TOKENS = 16
# Where no stream stays, a step may take as long as so many of the shortest ones.
NUM_SHORTEST_STEPS = 10


class StepTarget:
    """Bound the prompt tokens of a step by the time that it is expected to take.

    Args:
        args: the scheduler's flags.
        costs: what steps take.
    """

    def __init__(self, args: SchedulerArgs, costs: step_cost.StepCosts) -> None:
        self._costs = costs
        self._seconds = None if args.itl_target is None else AIM * args.itl_target / 1000

    def limit(
        self,
        limit: int,
        context: int,
        batch: ScheduleBatch,
        num_streams: int,
        all_move_on: bool = False,
    ) -> int:
        """Return how many further tokens of a prompt the step can take, at most `limit`.

        Args:
            limit: number of tokens that it could take without a target.
            context: number of the prompt's tokens before them.
            batch: the step as it is.
            num_streams: number of requests that decode in this step, or in the one after it.
            all_move_on: the prompt and these requests go on at other replicas.
        """
        if self._seconds is None or not self._costs.knows_prompts:
            return limit
        seconds = self._seconds
        if all_move_on:
            seconds = max(seconds, NUM_SHORTEST_STEPS * self._costs.shortest_s)
        spent = self._costs.seconds(num_streams, batch.num_prompt_tokens, batch.num_pairs)
        if num_streams and not batch.num_decodes:  # streams get their tokens in the step after it
            spent += self._costs.seconds(0)
        most = self._costs.tokens_within(seconds - spent, context)
        if batch.num_prompts == 0:
            most = max(most, MIN_PROMPT_TOKENS)
        return min(limit, most)


# Texts that become vectors, beside running streams.
#
# Thousands of them may wait, and many go into one step as a whole, which a target for the time of
# steps cannot cut. So what they add to the time of steps is bounded over several steps: each step
# with streams earns some seconds, and a text that begins spends those that it is expected to take.
# The time that steps take without texts is that of decode rows and of the prompts of chats.

# Of the time between two tokens of a stream, without --itl-target. It is 1.5 with what texts still
# owe when the last stream ends.
MAX_STREAM_SLOWDOWN = 1.47
MEAN_AIM = 0.95  # of --itl-target, for the mean: steps have time between them, too
MIN_TEXT_SHARE = 0.05  # of the time without texts, whatever the target says: texts always go on
NUM_AVERAGED_STEPS = 32  # in the mean time of steps without texts


class TextShare:
    """Bound the time that texts which become vectors take from running streams.

    Args:
        args: the scheduler's flags.
        costs: what steps take.
    """

    def __init__(self, args: SchedulerArgs, costs: step_cost.StepCosts) -> None:
        self._costs = costs
        self._target_s = None if args.itl_target is None else MEAN_AIM * args.itl_target / 1000
        self._left_s = 0.0
        self._has_streams = False
        # Of the last step and, on average, of the steps with streams before it; without texts.
        self._step_s = 0.0
        self._mean_s = 0.0

    def begin_step(self, num_streams: int) -> None:
        """Earn the seconds of a step. num_streams: number of requests that decode."""
        if self._has_streams:
            share = 1 / NUM_AVERAGED_STEPS if self._mean_s else 1.0
            self._mean_s += share * (self._step_s - self._mean_s)
        self._has_streams = num_streams > 0
        self._step_s = self._costs.seconds(num_streams)
        usual_s = self._mean_s or self._step_s
        target_s = self._target_s or MAX_STREAM_SLOWDOWN * usual_s
        earned_s = max(target_s - usual_s, MIN_TEXT_SHARE * usual_s)
        self._left_s = min(self._left_s + earned_s, earned_s) if self._has_streams else 0.0

    def may_begin(self, request: Request) -> bool:
        """Return whether a waiting request may begin in this step."""
        return self._left_s >= 0.0 or not (self._has_streams and request.makes_embedding)

    def spend(self, request: Request, num_tokens: int, num_pairs: int) -> None:
        """Take in what a step computes of a prompt: tokens, and pairs of tokens that attend."""
        spent_s = self._costs.seconds(0, num_tokens, num_pairs) - self._costs.seconds(0)
        if not request.makes_embedding:
            self._step_s += spent_s
        elif self._has_streams:
            self._left_s -= spent_s


class PlanParts(Protocol):
    """The requests, slots and pages of a step: the core's own, or those of a simulation."""

    @property
    def waiting(self) -> policies.AdmissionQueue:
        """The requests that wait."""

    @property
    def partial(self) -> dict[int, Request]:
        """The requests of whose prompts only a part is computed, by number."""

    @property
    def offload(self) -> KVOffload:
        """The pages beyond the pool."""

    @property
    def num_rows(self) -> int:
        """Number of decode rows of the next step."""

    @property
    def has_staying_rows(self) -> bool:
        """Whether a request decodes that does not go on at another replica at once."""

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no request holds."""

    def num_admissible(self, width: int) -> int:
        """Return how many requests may enter now, at most `width`."""

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are cached."""

    def expected_tokens(self) -> int:
        """Return for how many tokens all that hold pages may still take some."""

    def num_growing(self, request: Request) -> int:
        """Return for how many tokens beyond its prompt a request will take pages."""

    def can_admit(self, request: Request, expected: int, plan: Plan) -> bool:
        """Return whether slot and pages are free, and will probably last until a request ends.

        Args:
            request: one that waits.
            expected: number of tokens for which others may still take pages.
            plan: the step, in which another request may lose its slot for a more urgent one.
        """

    def admit(self, request: Request, plan: Plan, now: float) -> None:
        """Give slot and pages to a request that can be admitted."""

    def preempt_partial(self, first: list[Request], plan: Plan) -> None:
        """Take the slots of prompts under way for much more urgent requests among `first`."""

    def grow_prompt(self, request: Request, count: int, plan: Plan, may_retract: bool) -> int:
        """Append pages for the next `count` tokens of a prompt. Return how many have pages."""

    def on_part(self, request: Request, samples: bool) -> None:
        """Note that the step computes a part of a prompt. samples: it is the last one."""


class CoreParts:
    """The parts of the core.

    Args:
        state: the requests and pages.
        batching: when requests enter and leave the batch.
        retraction: takes slots for urgent requests.
        growth: gives prompts further pages.
    """

    def __init__(
        self,
        state: admission.CoreState,
        batching: Batching,
        retraction: Retraction,
        growth: PageGrowth,
    ) -> None:
        self.waiting = state.waiting
        self.partial = state.running.partial
        self.offload = state.offload
        self.num_cached_tokens = state.kv.num_cached_tokens
        self.expected_tokens = state.admission.expected_tokens
        self.grow_prompt = growth.grow_prompt
        self._kv = state.kv
        self._admission = state.admission
        self._running = state.running
        self._batching = batching
        self._retraction = retraction

    @property
    def num_rows(self) -> int:
        """Number of decode rows of the next step."""
        return self._running.num_rows

    @property
    def has_staying_rows(self) -> bool:
        """Whether a request decodes that does not go on at another replica at once."""
        return not all(request.will_soon_leave for request in self._running)

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no request holds."""
        return self._admission.num_free_slots

    def num_admissible(self, width: int) -> int:
        """Return how many requests may enter now.

        Without a free slot one is considered for which another may be preempted.
        """
        num_preempted = int(self._retraction.preempts)
        limit = min(width, self._admission.num_free_slots or num_preempted)
        return self._batching.num_admissible(limit)

    def num_growing(self, request: Request) -> int:
        """Return for how many tokens beyond its prompt a request may take pages."""
        return self._kv.growth([request], request.num_remaining_tokens)

    def can_admit(self, request: Request, expected: int, plan: Plan) -> bool:
        """Return whether a request can be admitted; else preempt another one where it may."""
        if self._admission.can_admit(request, expected):
            return True
        if self._retraction.preempts and not self._admission.pending_release:
            self._retraction.preempt_for(request, plan)
        return False

    def admit(self, request: Request, plan: Plan, now: float) -> None:
        """Give slot and pages to a request that can be admitted."""
        self._admission.admit(request, now)
        plan.batch.new.append(request.new_slot())

    def preempt_partial(self, first: list[Request], plan: Plan) -> None:
        """Retract prompts under way for much more urgent requests, by the policy of priorities."""
        if self._retraction.preempts:
            self._retraction.preempt_partial(first, plan)

    def on_part(self, request: Request, samples: bool) -> None:
        """Cache the pages of a part of a prompt, and let the request decode after the last one."""
        self._kv.cache_computed(request)
        if not samples:
            self.partial[request.seq] = request
            return
        self.partial.pop(request.seq, None)
        if request.num_remaining_tokens:
            self._running.add(request)
        else:
            self._batching.leave(request)


class PrefillPlanner:
    """Add prompts to steps.

    A step's tokens go to prompts under way, as far as they have a right to them; then to those
    that wait; and what these leave, to prompts under way again.

    Args:
        args: the scheduler's flags.
        parts: the requests, slots and pages.
        page_size: number of tokens in a page.
        budget: prompt tokens of a step.
        costs: what steps take.

    Attributes:
        budget: prompt tokens of a step.
        sharing: which prompts go first.
        target: bounds the prompt tokens of a step by its time.
        texts: bounds the time of texts that become vectors.
        width: largest number of requests that a step admits.
    """

    def __init__(
        self,
        args: SchedulerArgs,
        parts: PlanParts,
        page_size: int,
        budget: PrefillBudget,
        costs: step_cost.StepCosts,
    ) -> None:
        self._parts = parts
        self.budget = budget
        self.sharing = PrefillSharing(args, page_size, budget.cuts_prompts)
        self.target = StepTarget(args, costs)
        self.texts = TextShare(args, costs)
        self.width = args.prefill_width
        # What the last step that left requests waiting lacked, and when that was.
        self._lacked = WaitReason.BUDGET
        self._lacked_at = 0.0

    def over(self, parts: PlanParts) -> "PrefillPlanner":
        """Return a planner with the same rules over other parts, such as those of a simulation."""
        planner = copy.copy(self)
        planner._parts, planner.sharing = parts, copy.copy(self.sharing)
        planner.texts = copy.copy(self.texts)
        return planner

    @property
    def has_room(self) -> bool:
        """Whether the next step has slots and token budget to spare, if nothing runs."""
        parts, budget = self._parts, self.budget.stretched_tokens
        num_admissible = parts.num_admissible(self.width)
        first = parts.waiting.first(num_admissible, budget)
        num_uncached = sum(r.num_known_tokens - parts.num_cached_tokens(r) for r in first)
        return len(first) < num_admissible and num_uncached < budget

    def add_prompts(self, plan: Plan, now: float) -> None:
        """Add prompts under way, and admit requests from the waiting queue."""
        partial, waiting = self._parts.partial, self._parts.waiting
        self.texts.begin_step(self._parts.num_rows)
        if partial:
            first = waiting.first(1, self.budget.tokens)
            self._parts.preempt_partial(first, plan)
            # A stream that comes from another replica has little left to compute, and goes first.
            if partial and not self._can_go_on(first):
                self._add_first_parts(first, plan)
        budget = self.budget.tokens - plan.batch.num_prompt_tokens
        lacked: WaitReason | None
        if plan.has_retracted:
            lacked = WaitReason.PAGES
        elif budget <= 0 or not self.sharing.may_admit(len(partial)):
            lacked = WaitReason.BUDGET
        else:
            lacked = self._add_waiting(budget, plan, now) if len(waiting) else None
        self._add_last_parts(plan)
        self.sharing.end_step(plan.batch, partial.values())
        plan.lacked = lacked
        if lacked is not None:
            self._lacked, self._lacked_at = lacked, now

    def _can_go_on(self, waiting: list[Request]) -> bool:
        """Return whether a stream of another replica waits, whose pages are here."""
        awaits = self._parts.offload.awaits
        return any(request.goes_on and not awaits(request) for request in waiting)

    def add_alone(self, request: Request, plan: Plan, now: float) -> None:
        """Add a prompt to a step that has no other row. It is admitted if it has no slot."""
        if request.slot >= 0:
            self._add_part(request, self.budget.chunk, plan)
        elif self._parts.can_admit(request, 0, plan):
            self._admit(request, self.budget.chunk, plan, now)

    # --- prompts under way ------------------------------------------------------------------------

    def _add_first_parts(self, waiting: list[Request], plan: Plan) -> None:
        """Add what prompts under way get before those that wait, of which `waiting` is next."""
        partial, budget = self._parts.partial, self.budget
        oldest = min(partial.values(), key=age_of)
        alone = self._in_time(oldest, budget.tokens, oldest.num_computed_tokens, plan.batch)
        for request, limit in self.sharing.first_parts(partial.values(), alone, budget, waiting):
            if request.seq in partial:  # it may have been retracted for the one before
                self._add_part(request, limit, plan)

    def _add_last_parts(self, plan: Plan) -> None:
        """Add what the step has left for the prompts under way.

        They retract others for it only where the step would be empty.
        """
        batch, partial = plan.batch, self._parts.partial
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
        batch, count = plan.batch, request.num_uncomputed_tokens
        if self.budget.cuts_prompts and not request.goes_whole:
            computed = request.num_computed_tokens
            count = self._in_time(request, min(count, limit), computed, batch)
        count = self._parts.grow_prompt(request, count, plan, is_first)
        if count == 0:
            return 0
        self.texts.spend(request, count, count * request.num_computed_tokens + count * count // 2)
        samples = (batch.add_prefill if is_first else batch.extend_prefill)(request, count)
        self._parts.on_part(request, samples)
        return count

    def _in_time(self, request: Request, limit: int, context: int, batch: ScheduleBatch) -> int:
        """Return how many of `limit` tokens of a prompt the step can take under --itl-target."""
        parts = self._parts
        all_move_on = request.moves_on and not parts.has_staying_rows
        return self.target.limit(limit, context, batch, parts.num_rows, all_move_on)

    # --- the waiting queue ------------------------------------------------------------------------

    def _add_waiting(self, budget: int, plan: Plan, now: float) -> WaitReason | None:
        """Admit prompts from the waiting queue, as far as width, tokens, slots and pages last.

        The pages of each are cached at once, so that the next one may match them: a common prefix
        is computed once, in this very step.

        Returns:
            What the step lacks for the requests that still wait; None if it has admitted all.
        """
        parts, waiting, offload = self._parts, self._parts.waiting, self._parts.offload
        num_admissible = parts.num_admissible(self.width)
        if num_admissible <= 0:
            return WaitReason.SLOTS
        lacked, expected = None, parts.expected_tokens()
        lookahead = waiting.lookahead
        num_candidates = num_admissible + lookahead + len(offload.loads) + self.sharing.lookahead
        candidates = waiting.first(num_candidates, budget)
        if len(candidates) == len(waiting):
            wanted = sum(r.num_uncomputed_tokens for r in candidates)
            budget = self.budget.stretched(budget, wanted)
        for request in candidates:
            # What is loaded needs no budget, and the rest is short: it may pass other prompts.
            is_loading = offload.awaits(request) or (
                offload.expects_pages(request)
                and parts.can_admit(request, expected, plan)
                and offload.begin_load(request)
            )
            if is_loading:
                lacked = WaitReason.PAGES
                continue
            count = self._num_to_begin(request, budget, plan)
            if count is None:
                lacked = WaitReason.BUDGET
                continue
            if count == 0 or not parts.can_admit(request, expected, plan):
                lacked = self._lack_of(count)
                lookahead -= 1
                if lookahead < 0:
                    return lacked
                continue
            if offload.begin_load(request):
                lacked = WaitReason.PAGES
                continue
            waiting.take(request)
            expected += parts.num_growing(request)
            budget -= self._admit(request, count, plan, now)
            num_admissible -= 1
            has_budget = budget > 0 and self.sharing.may_admit(len(parts.partial))
            if num_admissible == 0 or not has_budget:
                return WaitReason.SLOTS if has_budget else WaitReason.BUDGET
        return lacked

    def _num_to_begin(self, request: Request, budget: int, plan: Plan) -> int | None:
        """Return how many of a waiting prompt's tokens the step can take; 0 for none.

        None: it stays behind prompts under way, but others may pass it. A prompt that goes whole
        is never cut: it fits, or is the first of its step.
        """
        parts, limits, batch = self._parts, self.budget, plan.batch
        if not self.texts.may_begin(request):
            return None
        num_cached, has_prompts = parts.num_cached_tokens(request), batch.num_prompts > 0
        num_uncached = request.num_known_tokens - num_cached
        if self.sharing.is_held_back(request, num_uncached, budget, parts.partial.values()):
            return None
        if has_prompts and limits.cuts_prompts:
            budget = self._in_time(request, budget, num_cached, batch)
            if self.sharing.is_full(num_uncached, budget, len(parts.partial)):
                return None
        if request.goes_whole:
            return num_uncached if num_uncached <= budget or not has_prompts else 0
        count = limits.num_tokens_for(num_uncached, budget, has_prompts)
        if count and limits.cuts_prompts:
            count = self._in_time(request, count, num_cached, batch)
        if 0 < count < num_uncached:
            count = self.sharing.first_part(count, budget, len(parts.waiting))
        return count

    def _lack_of(self, count: int) -> WaitReason:
        """Return why a request whose next `count` tokens fit into the step is not admitted."""
        if count == 0:
            return WaitReason.BUDGET
        return WaitReason.PAGES if self._parts.num_free_slots else WaitReason.SLOTS

    def _admit(self, request: Request, limit: int, plan: Plan, now: float) -> int:
        """Give slot and pages to a request and add its first tokens. Return their number."""
        if not request.admitted_at and self._lacked_at > request.tokenized_at:
            request.waited_for += (self._lacked,)
        self._parts.admit(request, plan, now)
        plan.admitted.append(request)
        return self._add_part(request, limit, plan)
