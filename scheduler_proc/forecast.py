"""The forecast: when waiting requests are admitted and have their first tokens, by simulation.

In this order: what the last answers say about the lengths of others (`RecentEnds`), the prompts and
steps of a simulated future and its time, what will be cached of each prompt (`SharedBeginnings`),
the simulation of the queue (`WaitForecast`), and the refusal of a ttft_target that cannot be met
(`refuse_target`).
"""

import copy
import heapq
import math
from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol

from quadriga.errors import InvalidRequest, QuadrigaError, QueueFull
from scheduler_proc.core import SchedulerCore
from scheduler_proc.planning.admission import MAX_EXPECTED_TOKENS
from scheduler_proc.planning.policies import SortedQueue
from scheduler_proc.planning.prefill import age_of
from scheduler_proc.state.batch import BatchMode
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import FinishReason, Request, RequestStatus

# Numbers that are spread evenly, in place of random ones.

# Its multiples, without their whole parts, are spread evenly.
GOLDEN_RATIO = 0.6180339887498949


class Spread:
    """Numbers from 0 to 1, the same in each run, of which any few that follow are far apart."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> float:
        """Return the next number."""
        self._count += 1
        return self._count * GOLDEN_RATIO % 1


# What a forecast plays with: prompts and steps that count, and compute nothing.


@dataclass(slots=True, eq=False)
class PlayedPrompt:
    """A request whose prompt waits or is partly computed, in a possible future.

    The attributes that a request has mean what they mean there.

    Attributes:
        num_decode_steps: decode steps that it has after its prompt, in the future that is played.
        num_held_tokens: tokens of KV that it is given when it is admitted, and frees at its end,
            with those that it is expected to generate.
        leader: prompt ahead of it that computes its first `num_led_tokens` tokens; None: none does.
        held_by: prompt under way that goes first, if one was found.
        admitted_s: seconds until it is admitted; None: it is not yet.
        first_token_s: seconds until its first token; None: it has none yet.
    """

    seq: int
    due_at: float
    priority: int
    is_background: bool
    tokens: "array[int]"
    cache_salt: bytes
    wants_prompt_logprobs: bool
    num_known_tokens: int
    num_computed_tokens: int
    num_decode_steps: int = 0
    num_held_tokens: float = 0.0
    leader: "PlayedPrompt | None" = None
    num_led_tokens: int = 0
    held_by: "PlayedPrompt | None" = None
    admitted_s: float | None = None
    first_token_s: float | None = None

    @classmethod
    def of(cls, request: Request, num_computed: int) -> "PlayedPrompt":
        """Return a request's prompt, of which so many tokens are computed or cached."""
        return cls(
            seq=request.seq,
            due_at=request.due_at,
            priority=request.priority,
            is_background=request.is_background,
            tokens=request.tokens,
            cache_salt=request.cache_salt,
            wants_prompt_logprobs=request.wants_prompt_logprobs,
            num_known_tokens=request.num_known_tokens,
            num_computed_tokens=num_computed,
        )

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens that are not computed yet."""
        return self.num_known_tokens - self.num_computed_tokens


class PlayedStep:
    """The rows of a step: how many decode, and how many tokens of which prompts are computed.

    Attributes:
        num_decodes: number of decode rows.
        requests: the prompts.
        num_tokens: number of tokens that each of them computes.
        num_prompt_tokens: their sum.
        num_pairs: pairs of a prompt token and a token that it attends to.
    """

    def __init__(self, num_decodes: int) -> None:
        self.num_decodes = num_decodes
        self.requests: list[PlayedPrompt] = []
        self.num_tokens: list[int] = []
        self.num_prompt_tokens = 0
        self.num_pairs = 0

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.requests)

    def add(self, prompt: PlayedPrompt, count: int) -> None:
        """Let the step compute the next `count` tokens of a prompt."""
        self.num_pairs += count * prompt.num_computed_tokens + count * (count + 1) // 2
        self.num_prompt_tokens += count
        prompt.num_computed_tokens += count
        if prompt in self.requests:
            self.num_tokens[self.requests.index(prompt)] += count
        else:
            self.requests.append(prompt)
            self.num_tokens.append(count)


# The time of a future that is played, and the requests that decode in it until they end.


class RunningEnd(NamedTuple):
    """An end in the future: after how many decode steps, and the tokens of KV that it frees."""

    step: float
    num_tokens: float


class StepSeconds(Protocol):
    """How long steps take, as StepCosts.seconds has it."""

    def __call__(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds of a step."""


class PlayedTime:
    """The seconds and decode steps that were played, and the ends of the running requests.

    Args:
        core: its mode, and its number of decode rows.
        step_seconds: how long steps take.

    Attributes:
        seconds: that were played.
    """

    def __init__(self, core: SchedulerCore, step_seconds: StepSeconds) -> None:
        self._core = core
        self._step_seconds = step_seconds
        self.seconds = 0.0
        self._step = 0.0  # decode steps
        self._ends: list[RunningEnd] = []  # a heap

    @property
    def is_known(self) -> bool:
        """Whether a step was measured."""
        return bool(self._step_seconds(1))

    @property
    def num_running(self) -> int:
        """Number of requests that decode."""
        return len(self._ends)

    @property
    def num_decodes(self) -> int:
        """Number of decode rows of a step."""
        return min(self._core.running.width, len(self._ends))

    @property
    def steps_until_end(self) -> float:
        """Decode steps until the first running request ends; there is one."""
        return self._ends[0].step - self._step

    def add_running(self, num_decode_steps: float, num_tokens: float) -> None:
        """Let a request decode from now on.

        Args:
            num_decode_steps: until its end, if it has a row in each.
            num_tokens: of KV, which it frees then.
        """
        # Decode steps in which each running request gets a token, where they take turns.
        turns = max(1.0, (len(self._ends) + 1) / self._core.running.width)
        heapq.heappush(self._ends, RunningEnd(self._step + num_decode_steps * turns, num_tokens))

    def begin_in_step(self, has_partial: bool) -> None:
        """Let the rest of the step pass that runs now: half of it, on average."""
        if self._ends or has_partial:
            num_tokens = self._core.prefill.budget.tokens if has_partial else 0
            self.seconds += self._step_seconds(self.num_decodes, num_tokens) / 2

    def pass_prompts(self, step: PlayedStep, num_alike: int, has_partial: bool) -> None:
        """Let the time of steps with prompts pass.

        Args:
            step: all of their prompt tokens.
            num_alike: number of the steps, which are alike.
            has_partial: whether prompts are partly computed after them.
        """
        mode = self._core.mode
        # Whether running requests get a token with a step of prompts, or right after it.
        decodes_follow = mode in (BatchMode.MIXED, BatchMode.ALTERNATE) or has_partial
        num_tokens, num_pairs = step.num_prompt_tokens // num_alike, step.num_pairs // num_alike
        if mode is BatchMode.MIXED:
            step_s = self._step_seconds(step.num_decodes, num_tokens, num_pairs)
        else:
            step_s = self._step_seconds(0, num_tokens, num_pairs)
            if decodes_follow and step.num_decodes:
                step_s += self._step_seconds(step.num_decodes)
        self.seconds += num_alike * step_s
        self._step += num_alike * decodes_follow

    def pass_decodes(self) -> None:
        """Let decode steps pass until a running request ends; there is one."""
        self.seconds += self.steps_until_end * self._step_seconds(self.num_decodes)
        self._step = self._ends[0].step

    def end_due(self) -> list[RunningEnd]:
        """Remove the requests that have all of their tokens, and return their ends."""
        ended = []
        while self._ends and self._ends[0].step <= self._step:
            ended.append(heapq.heappop(self._ends))
        return ended


# What the requests that ended lately say about the ones that run and wait.

NUM_RECENT_ENDS = 64


class RecentEnds:
    """The lengths of the last answers, and the shares of their prompts that were cached."""

    def __init__(self) -> None:
        self._lengths: deque[tuple[int, bool]] = deque(maxlen=NUM_RECENT_ENDS)
        self._prompts: deque[tuple[int, int]] = deque(maxlen=NUM_RECENT_ENDS)
        self._curve: list[tuple[int, float]] | None = None

    def on_end(self, request: Request) -> None:
        """Take in the end of a request that was admitted."""
        is_stop = request.finish_reason is FinishReason.STOP
        if request.can_stop:
            self._lengths.append((request.num_generated, is_stop))
        self._prompts.append((request.num_prompt, request.cached_tokens))
        self._curve = None

    @property
    def uncached_share(self) -> float:
        """The share of the prompts' tokens that were computed; 1.0 without recent ends."""
        num_tokens = sum(num_prompt for num_prompt, _ in self._prompts)
        return 1 - sum(cached for _, cached in self._prompts) / num_tokens if num_tokens else 1.0

    def length(self, num_generated: int, limit: int, share: float) -> int:
        """Return a length below which this share of the answers stays that can stop, like one.

        Args:
            num_generated: tokens that the answer has.
            limit: its largest length.
            share: 0 to 1.
        """
        curve = self.curve
        first = bisect_left(curve, (num_generated + 1, 0.0))
        reached = curve[first - 1][1] if first else 1.0
        wanted = (1 - share) * reached
        place = bisect_left(curve, -wanted, lo=first, key=lambda point: -point[1])
        return min(limit, curve[place][0]) if place < len(curve) else limit

    @property
    def curve(self) -> list[tuple[int, float]]:
        """Lengths at which answers stopped, each with the share of answers that is longer.

        Answers that ended for another reason, such as their limit, would have gone on: they count
        up to there only (Kaplan and Meier, 1958).
        """
        if self._curve is None:
            self._curve = _survival(list(self._lengths))
        return self._curve


def _survival(lengths: list[tuple[int, bool]]) -> list[tuple[int, float]]:
    stops = Counter(length for length, is_stop in lengths if is_stop)
    ends = Counter(length for length, _ in lengths)
    num_left, share, curve = len(lengths), 1.0, []
    for length in sorted(ends):
        if stops[length]:
            share *= 1 - stops[length] / num_left
            curve.append((length, share))
        num_left -= ends[length]
    return curve


# How much of each waiting prompt will be cached when it is admitted.
#
# A beginning is cached that the prefix tree has now, or that a prompt further ahead computes,
# until its pages are evicted: the least recently used ones go first. What the waiting prompts use
# is played in their order. The pages that the tree has now were used in an unknown order: how
# long a beginning among them has not been used is spread evenly over all that it could be.

MAX_LEADERS = 4  # prompts with the same next page that a prompt is compared with


class _RecentUses:
    """What the prompts have used, up to as many tokens as the pool holds."""

    def __init__(self, num_tokens: int) -> None:
        self._num_free = float(num_tokens)
        self._sizes: OrderedDict[Hashable, float] = OrderedDict()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._sizes

    def use(self, name: Hashable, num_tokens: float) -> None:
        """Use a beginning or the rest of a prompt, which takes pages for so many tokens."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return
        self._sizes[name] = num_tokens
        self._num_free -= num_tokens
        while self._num_free < 0 and len(self._sizes) > 1:
            _name, freed = self._sizes.popitem(last=False)
            self._num_free += freed


class SharedBeginnings:
    """The beginnings of prompts that are cached, or about to be.

    Args:
        core: the pages and the prefix tree.
        partial: the prompts that are partly computed, by number.
    """

    def __init__(self, core: SchedulerCore, partial: Mapping[int, PlayedPrompt]) -> None:
        self._core = core
        self._page_size = core.kv.page_size
        self._num_available = core.kv.num_available * self._page_size
        self._uses = _RecentUses(core.kv.num_tokens)
        self._was_cached: set[Node] = set()
        self._num_reused = 0  # tokens of beginnings that the tree has now
        self._num_new = 0.0  # tokens for which the prompts up to now take pages
        self._ages = Spread()
        self._leaders: dict[tuple[Node, bytes], list[PlayedPrompt]] = {}
        for request in core.running.partial.values():
            self._add_partial(request, partial[request.seq])

    def prompt_of(self, request: Request, num_growing: float) -> PlayedPrompt:
        """Return the prompt of the next request of the queue, with what will be cached of it.

        Args:
            request: it waits.
            num_growing: number of tokens beyond its prompt for which it takes pages.
        """
        num_cached, node = self._core.kv.num_cached_tokens(request), request.prefix_node
        beginning = 0 if node is None else node.depth * self._page_size
        if node is not None and num_cached and not self._stays(node, beginning):
            num_cached = 0
        prompt = PlayedPrompt.of(request, num_cached)
        if node is not None and request.prefix_miss:
            self._follow(prompt, node, request.prefix_miss)
        if beginning:
            self._uses.use(node, beginning)
        if prompt.leader is not None:
            self._uses.use(prompt.leader.seq, 0)
        rest = prompt.num_known_tokens - max(beginning, prompt.num_computed_tokens)
        self._uses.use(prompt.seq, rest + num_growing)
        self._num_new += prompt.num_uncomputed_tokens + num_growing
        return prompt

    def _stays(self, node: Node, num_tokens: int) -> bool:
        """Return whether the tree will still have a beginning that it has now.

        Used for longer than a share of the available pages, it is evicted when as many have been
        taken, without those that beginnings among them have, which are used again.
        """
        if node in self._was_cached:
            return node in self._uses
        self._was_cached.add(node)
        share = 1.0 if node.ref_count else self._ages.next()
        stays = self._num_new <= share * (self._num_available - self._num_reused)
        self._num_reused += num_tokens if stays else 0
        return stays

    def _add_partial(self, request: Request, prompt: PlayedPrompt) -> None:
        """Take in a prompt that is partly computed: others may wait for the rest of it."""
        path, kv = request.prefix_path, self._core.kv
        node = path[-1] if path else kv.tree.root
        has_more = request.num_known_tokens >= (node.depth + 1) * self._page_size
        if has_more and not request.wants_prompt_logprobs:
            self._leaders[node, kv.page_key(request, node.depth)] = [prompt]
            self._uses.use(prompt.seq, prompt.num_known_tokens)

    def _follow(self, prompt: PlayedPrompt, node: Node, next_page: bytes) -> None:
        """Let a prompt follow the one that computes most of its beginning, if there is one."""
        leaders = self._leaders.setdefault((node, next_page), [])
        leaders[:] = [leader for leader in leaders if leader.seq in self._uses]
        num_pages = prompt.num_computed_tokens // self._page_size
        for leader in leaders:
            num_common = _num_common_pages(prompt, leader, self._page_size, node.depth + 1)
            if num_common > num_pages:
                prompt.leader, num_pages = leader, num_common
        prompt.num_led_tokens = prompt.num_computed_tokens = num_pages * self._page_size
        if len(leaders) < MAX_LEADERS:
            leaders.append(prompt)


def _num_common_pages(
    prompt: PlayedPrompt, leader: PlayedPrompt, page_size: int, num_equal: int
) -> int:
    """Return how many first pages two prompts have in common; `num_equal` are known to be."""
    limit = min(prompt.num_known_tokens - 1, leader.num_known_tokens) // page_size
    one, other = memoryview(prompt.tokens), memoryview(leader.tokens)
    while num_equal < limit:
        middle = (num_equal + limit + 1) // 2
        begin, end = num_equal * page_size, middle * page_size
        if one[begin:end] == other[begin:end]:
            num_equal = middle
        else:
            limit = middle - 1
    return num_equal


# When waiting requests will probably be admitted and have their first tokens: the queue is
# played.
#
# Steps are played one after the other, by the rules of the core and at the prices of the last
# steps. A step has a token for each request that decodes, what is left of prompts that are partly
# computed, and waiting prompts as far as slots, pages and the step's budget last;
# prefill/sharing.py says how prompts share it. Running requests end after the lengths that recent
# answers had, or at their max_new_tokens; each end makes room for the next requests of the queue.
#
# A single future is played, with lengths that are spread evenly over those of recent answers, so
# that the first of many ends comes early, as it does. Steps that are alike are played at once.
# Requests that arrive later are not foreseen.

MAX_STEPS = 300  # that are played, in 20 ms or so
MAX_ALIKE_STEPS = 8  # that are played at once: a prompt's later tokens take longer


class WaitForecast:
    """One future of the waiting queue, from now on.

    Args:
        core: the queue, the running batch and the pages as they are.
        ends: answers that ended lately.
        step_seconds: how long steps take.
        requests: the waiting requests that are played, in the order of admission.
    """

    def __init__(
        self,
        core: SchedulerCore,
        ends: RecentEnds,
        step_seconds: StepSeconds,
        requests: Iterable[Request],
    ) -> None:
        self._core = core
        self._ends = ends
        self._time = PlayedTime(core, step_seconds)
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


# When a request that arrives now has its first token, so that a target is refused that fails.
#
# The steps are played that come before it (wait_forecast.py), at the prices of the last ones.

MAX_PLAYED = 256  # requests of the queue that are looked at
MIN_RETRY_AFTER_S = 0.1


def refuse_target(
    core: SchedulerCore, ends: RecentEnds, request: Request, now: float
) -> QuadrigaError | None:
    """Return why the ttft_target of a new request cannot be met; None: it can, or is unknown."""
    target_s = request.sampling.params.ttft_target
    if target_s is None or not core.costs.knows_prompts:
        return None
    own_s = _prompt_alone_s(core, request)
    elapsed_s = max(0.0, now - request.received_at)
    num_new = request.num_known_tokens - core.kv.num_cached_tokens(request)
    if own_s > target_s:
        return InvalidRequest(
            f"ttft_target is {target_s:g} s, and {num_new} prompt tokens that are not cached take"
            f" about {own_s:.3g} s on this server when it has nothing else to do: allow more, or"
            " shorten the prompt",
            "ttft_target",
        )
    ahead = _requests_ahead(core, request)
    if ahead is None:
        return None
    expected_s = elapsed_s + _ttft_s(core, ends, request, ahead)
    if expected_s <= target_s:
        return None
    retry_after_s = max(expected_s - target_s, MIN_RETRY_AFTER_S)
    return QueueFull(
        f"ttft_target is {target_s:g} s, and the first token is expected after {expected_s:.3g} s:"
        f" {len(ahead)} waiting requests go first and {core.running.num_rows} run; allow more, or"
        f" try again in {retry_after_s:.2g} s",
        retry_after_s,
        len(ahead) + 1,
        expected_s,
    )


def _requests_ahead(core: SchedulerCore, request: Request) -> list[Request] | None:
    """Return the waiting requests that go first, at most MAX_PLAYED; None: unknown.

    By other orders than that of due times, such as turns of tenants, it may be any of them.
    """
    queue = core.waiting
    if not len(queue):
        return []
    if not isinstance(queue, SortedQueue) or not queue.orders_by_due_time:
        return None
    queued, key = queue.first(MAX_PLAYED, core.prefill.budget.tokens), queue.key(request)
    return list(takewhile(lambda other: queue.key(other) < key, queued))


def _ttft_s(core: SchedulerCore, ends: RecentEnds, request: Request, ahead: list[Request]) -> float:
    """Return the seconds until a request has its first token; at least so many if that is far."""
    forecast = WaitForecast(core, ends, core.costs.seconds, [*ahead, request])
    forecast.play(until=request)
    first_token_s = forecast.first_token_s(request)
    return forecast.played_s if first_token_s is None else first_token_s


def _prompt_alone_s(core: SchedulerCore, request: Request) -> float:
    """Return the seconds in which a prompt is computed beside nothing else."""
    num_cached = core.kv.num_cached_tokens(request)
    count = request.num_known_tokens - num_cached
    pairs = count * num_cached + count * (count + 1) // 2
    num_steps = math.ceil(count / core.prefill.budget.tokens)
    return core.costs.seconds(0, count, pairs) + (num_steps - 1) * core.costs.seconds(0)
