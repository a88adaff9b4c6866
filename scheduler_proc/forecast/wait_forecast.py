"""When waiting requests will probably be admitted and have their first tokens: the queue is played.

Steps are played one after the other, by the rules of the core and at the prices of the last steps.
A step has a token for each request that decodes, what is left of prompts that are partly computed,
and waiting prompts as far as slots, pages and the step's budget last; prefill/sharing.py says how
prompts share it. Running requests end after the lengths that recent answers had, or at their
max_new_tokens; each end makes room for the next requests of the queue.

A single future is played, with lengths that are spread evenly over those of recent answers, so that
the first of many ends comes early, as it does. Steps that are alike are played at once. Requests
that arrive later are not foreseen.
"""

import copy
from collections.abc import Iterable

from scheduler_proc.core import SchedulerCore
from scheduler_proc.forecast.played import PlayedPrompt, PlayedStep
from scheduler_proc.forecast.played_time import PlayedTime, StepSeconds
from scheduler_proc.forecast.recent_ends import RecentEnds
from scheduler_proc.forecast.shared_beginnings import SharedBeginnings
from scheduler_proc.forecast.spread import Spread
from scheduler_proc.planning.admission import MAX_EXPECTED_TOKENS
from scheduler_proc.prefill.sharing import age_of
from scheduler_proc.state.plan import BatchMode
from scheduler_proc.state.request import Request, RequestStatus

MAX_STEPS = 300  # that are played, in 20 ms or so
MAX_ALIKE_STEPS = 8  # that are played at once: a prompt's later tokens take longer


class WaitForecast:
    """One future of the waiting queue, from now on.

    Args:
        core: the queue, the running batch and the pages as they are.
        ends: answers that ended lately.
        costs: how long steps take.
        requests: the waiting requests that are played, in the order of admission.
    """

    def __init__(
        self,
        core: SchedulerCore,
        ends: RecentEnds,
        costs: StepSeconds,
        requests: Iterable[Request],
    ) -> None:
        self._core = core
        self._ends = ends
        self._time = PlayedTime(core, costs)
        self._ratio = core.admission.ratio.value
        self._sharing = copy.copy(core.prefill.sharing)
        self._num_slots = core.admission.num_free_slots
        self._num_free_tokens = float(core.kv.num_available * core.kv.page_size)
        self._lengths = Spread()
        self._num_steps = 0
        self._partial: dict[int, PlayedPrompt] = {}
        self._stuck_budget = 0  # with which none of the waiting requests could begin
        partial = {request.seq for request in core.running.partial.values()}
        for request in core.admission.holders.values():
            self._add_holder(request, is_partial=request.seq in partial)
        self._time.begin_in_step(bool(self._partial))
        shared = SharedBeginnings(core, self._partial)
        self._waiting = [self._waiting_prompt(request, shared) for request in requests]
        self._prompts = {prompt.seq: prompt for prompt in self._waiting}

    def wait_s(self, request: Request) -> float | None:
        """Return the seconds until a request that is played is admitted; None: unknown."""
        return self._prompts[request.seq].admitted_s

    def first_token_s(self, request: Request) -> float | None:
        """Return the seconds until a request that is played has its first token; None: unknown."""
        return self._prompts[request.seq].first_token_s

    @property
    def played_s(self) -> float:
        """Seconds that were played."""
        return self._time.seconds

    @property
    def num_steps(self) -> int:
        """Number of steps that were played."""
        return self._num_steps

    def play(self, until: Request | None = None) -> None:
        """Play steps until all requests are admitted, or one of them has its first token."""
        last = None if until is None else self._prompts[until.seq]
        if not self._time.is_known:
            return
        while self._num_steps < MAX_STEPS and self._goes_on(last):
            self._num_steps += 1
            self._end_due()
            step = self._compose()
            if step.num_prompts:
                self._run(step)
            elif self._time.num_running:
                self._time.pass_decodes()
            else:
                return  # what waits never fits

    def _goes_on(self, last: PlayedPrompt | None) -> bool:
        return bool(self._waiting) if last is None else last.first_token_s is None

    # --- the beginning ----------------------------------------------------------------------------

    def _add_holder(self, request: Request, is_partial: bool) -> None:
        num_growing = self._num_growing(request)
        self._num_free_tokens -= num_growing
        num_tokens = self._ends.uncached_share * request.num_known_tokens + num_growing
        num_left = self._draw(request, request.max_total_tokens - request.num_prompt)
        num_left -= request.num_generated
        if is_partial:
            prompt = PlayedPrompt.of(request, request.num_computed_tokens)
            prompt.num_decode_steps, prompt.num_held_tokens = num_left - 1, num_tokens
            self._partial[request.seq] = prompt
        else:
            steps = 0 if request.status >= RequestStatus.RETRACTED else num_left
            self._time.add_running(steps, num_tokens)

    def _waiting_prompt(self, request: Request, shared: SharedBeginnings) -> PlayedPrompt:
        num_growing = self._num_growing(request)
        prompt = shared.prompt_of(request, num_growing)
        prompt.num_held_tokens = prompt.num_uncomputed_tokens + num_growing
        limit = request.max_total_tokens - request.num_prompt
        prompt.num_decode_steps = self._draw(request, limit) - request.num_generated - 1
        return prompt

    def _num_growing(self, request: Request) -> float:
        """Return the tokens for which a request is expected to take further pages."""
        return self._ratio * min(request.num_remaining_tokens, MAX_EXPECTED_TOKENS)

    def _draw(self, request: Request, limit: int) -> int:
        """Return the length of an answer."""
        if not request.can_stop:
            return limit
        return self._ends.length(request.num_generated, limit, self._lengths.next())

    # --- a step -----------------------------------------------------------------------------------

    def _compose(self) -> PlayedStep:
        """Return the prompts of the next step; none where a running request has to end first."""
        step, partial = PlayedStep(self._time.num_decodes), self._partial
        budget, sharing = self._core.prefill.budget, self._sharing
        if (
            self._core.mode is BatchMode.DECODE_FIRST
            and self._time.num_running >= self._core.running.width
        ):
            return step
        if partial:
            oldest = min(partial.values(), key=age_of)
            alone = self._in_time(budget.tokens, oldest.num_computed_tokens, step)
            first = self._waiting[:1]
            for prompt, limit in sharing.first_parts(partial.values(), alone, budget, first):
                self._add(prompt, limit, step)
        num_left = budget.tokens - step.num_prompt_tokens
        if num_left > self._stuck_budget and sharing.may_admit(len(partial)):
            self._admit(num_left, step)
        num_left = budget.chunk if step.num_prompts <= 1 else budget.tokens
        num_left -= step.num_prompt_tokens
        for prompt in sharing.last_parts(partial.values()):
            num_left -= self._add(prompt, num_left, step) if num_left > 0 else 0
        sharing.end_step(step, partial.values())
        return step

    def _add(self, prompt: PlayedPrompt, limit: int, step: PlayedStep) -> int:
        """Add the next tokens of a prompt, at most `limit`. Return their number."""
        count = prompt.num_uncomputed_tokens
        if self._core.prefill.budget.cuts_prompts:
            count = self._in_time(min(count, limit), prompt.num_computed_tokens, step)
        if count > 0:
            step.add(prompt, count)
            self._partial[prompt.seq] = prompt
            if prompt.num_uncomputed_tokens == 0:
                del self._partial[prompt.seq]
        return count

    def _in_time(self, limit: int, context: int, step: PlayedStep) -> int:
        return self._core.prefill.target.limit(limit, context, step, self._time.num_decodes)

    def _admit(self, budget: int, step: PlayedStep) -> None:
        """Admit waiting prompts, as far as width, tokens, slots and pages last."""
        core, whole_budget = self._core, budget
        num_admissible = min(core.prefill.width, self._num_slots)
        lookahead = core.waiting.lookahead
        num_looked_at = num_admissible + lookahead + self._sharing.lookahead
        candidates = self._waiting[:num_looked_at] if num_admissible else []
        if len(candidates) == len(self._waiting):
            wanted = sum(prompt.num_uncomputed_tokens for prompt in candidates)
            budget = core.prefill.budget.stretched(budget, wanted)
        num_admitted = 0
        for prompt in candidates:
            count = self._num_to_begin(prompt, budget, len(self._waiting) - num_admitted, step)
            if count is None:
                continue
            if count == 0 or not self._fits(prompt, step):
                lookahead -= 1
                if lookahead < 0:
                    break
                continue
            prompt.admitted_s = self._time.seconds
            self._num_slots -= 1
            self._num_free_tokens -= prompt.num_held_tokens
            budget -= self._add(prompt, count, step)
            num_admitted += 1
            has_budget = budget > 0 and self._sharing.may_admit(len(self._partial))
            if num_admitted == num_admissible or not has_budget:
                break
        if num_admitted:
            left = [prompt for prompt in candidates if prompt.admitted_s is None]
            self._waiting[: len(candidates)] = left
        else:
            self._stuck_budget = whole_budget

    def _num_to_begin(
        self, prompt: PlayedPrompt, budget: int, num_waiting: int, step: PlayedStep
    ) -> int | None:
        """Return how many of a waiting prompt's tokens the step can take, as the core does it."""
        rules, sharing = self._core.prefill.budget, self._sharing
        num_uncached, num_cached = prompt.num_uncomputed_tokens, prompt.num_computed_tokens
        if self._is_behind(prompt):
            return None
        if step.num_prompts and rules.cuts_prompts:
            budget = self._in_time(budget, num_cached, step)
        if sharing.is_held_back(prompt, num_uncached, budget, self._partial.values()):
            return None
        count = rules.num_tokens_for(num_uncached, budget, step.num_prompts > 0)
        if count and rules.cuts_prompts:
            count = self._in_time(count, num_cached, step)
        if 0 < count < num_uncached:
            count = sharing.first_part(count, budget, num_waiting)
        return count

    def _is_behind(self, prompt: PlayedPrompt) -> bool:
        """Return whether a waiting prompt stays behind one under way, or one that it shares with.

        The one that is found goes first until its own prompt is computed: what is left of it only
        becomes less.
        """
        leader, other = prompt.leader, prompt.held_by
        if leader is not None and leader.num_computed_tokens < prompt.num_led_tokens:
            return True
        if other is None or other.seq not in self._partial:
            num_uncached, goes_first = prompt.num_uncomputed_tokens, self._sharing.goes_first
            others = self._partial.values() if self._sharing.lookahead else ()
            found = (other for other in others if goes_first(other, prompt, num_uncached))
            prompt.held_by = next(found, None)
        return prompt.held_by is not None

    def _fits(self, prompt: PlayedPrompt, step: PlayedStep) -> bool:
        """Return whether a prompt has room; without others beside it, it always has."""
        is_alone = not (self._time.num_running or self._partial or step.num_prompts)
        return is_alone or prompt.num_held_tokens <= self._num_free_tokens

    # --- time -------------------------------------------------------------------------------------

    def _run(self, step: PlayedStep) -> None:
        """Let the time of a step pass, and of those like it that follow."""
        num_alike = self._num_alike(step)
        if num_alike > 1:
            step.add(step.requests[0], (num_alike - 1) * step.num_tokens[0])
        self._time.pass_prompts(step, num_alike, bool(self._partial))
        for prompt in step.requests:
            if prompt.num_uncomputed_tokens == 0:
                prompt.first_token_s = self._time.seconds
                self._time.add_running(prompt.num_decode_steps, prompt.num_held_tokens)
                self._stuck_budget = 0

    def _num_alike(self, step: PlayedStep) -> int:
        """Return how many steps go on with one prompt alone, as this one does."""
        (prompt, *others), count = step.requests, step.num_tokens[0]
        budget = self._core.prefill.budget.tokens
        is_alone = (
            len(self._partial) == 1 and not others and prompt.admitted_s != self._time.seconds
        )
        may_admit = self._waiting and self._stuck_budget < budget and self._sharing.may_admit(1)
        if not is_alone or may_admit:
            return 1
        num_alike = min(MAX_ALIKE_STEPS, 1 + (prompt.num_uncomputed_tokens - 1) // count)
        until_end = self._time.steps_until_end if self._time.num_running else MAX_ALIKE_STEPS
        return max(1, min(num_alike, int(until_end)))

    def _end_due(self) -> None:
        """Let the requests end that have all of their tokens."""
        for end in self._time.end_due():
            self._num_slots += 1
            self._num_free_tokens += end.num_tokens
            self._stuck_budget = 0
