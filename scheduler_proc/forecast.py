"""The forecast: when waiting requests are admitted and have their first tokens, by simulation.

In this order: simulated time (`SimulatedTime`), what the last answers say about the lengths of
others (`RecentEnds`), what will be cached of each prompt (`SharedPrefixes`), the requests, slots
and pages of a simulation (`SimulatedParts`), the simulation itself (`WaitForecast`), and the
refusal of a ttft_target that cannot be met (`refuse_target`).
"""

import heapq
import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields
from itertools import islice, takewhile
from operator import attrgetter
from typing import NamedTuple, Protocol

from quadriga.errors import InvalidRequest, QuadrigaError, QueueFull
from quadriga.sampling.params import SamplingParams
from quadriga.wire.to_scheduler import Submit
from scheduler_proc.core import SchedulerCore
from scheduler_proc.planning import admission, policies
from scheduler_proc.state.batch import BatchMode, Plan, ScheduleBatch
from scheduler_proc.state.kv_offload import NoOffload
from scheduler_proc.state.prefix_tree import Node
from scheduler_proc.state.request import FinishReason, Request, RequestStatus

# The fractional parts of its multiples are spread evenly.
GOLDEN_RATIO = 0.6180339887498949


class Spread:
    """Numbers from 0 to 1, the same in each run, of which any few that follow are far apart."""

    def __init__(self) -> None:
        self._count = 0

    def next(self) -> float:
        """Return the next number."""
        self._count += 1
        return self._count * GOLDEN_RATIO % 1


class RunningEnd(NamedTuple):
    """An end in the future: after how many decode steps, and the tokens of KV that it frees."""

    step: float
    num_tokens: float


class StepSeconds(Protocol):
    """How long steps take, as StepCosts.seconds has it."""

    def __call__(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds of a step."""


class SimulatedTime:
    """The seconds and decode steps that have passed, and the ends of the running requests.

    Args:
        core: its mode, and its number of decode rows.
        step_seconds: how long steps take.

    Attributes:
        seconds: since the beginning of the simulation.
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

    def pass_prompts(self, step: ScheduleBatch, num_alike: int, has_partial: bool) -> None:
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
            step_s = self._step_seconds(self.num_decodes, num_tokens, num_pairs)
        else:
            step_s = self._step_seconds(0, num_tokens, num_pairs)
            if decodes_follow and self.num_decodes:
                step_s += self._step_seconds(self.num_decodes)
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
# A prefix is cached that the prefix tree has now, or that a prompt further ahead computes, until
# its pages are evicted: the least recently used ones go first. What the waiting prompts use is
# simulated in their order. The pages that the tree has now were used in an unknown order: how long
# a prefix among them has not been used is spread evenly over all that it could be.

MAX_LEADERS = 4  # prompts with the same next page that a prompt is compared with


class _RecentUses:
    """What the prompts have used, up to as many tokens as the pool holds."""

    def __init__(self, num_tokens: int) -> None:
        self._num_free = float(num_tokens)
        self._sizes: OrderedDict[Hashable, float] = OrderedDict()

    def __contains__(self, name: Hashable) -> bool:
        return name in self._sizes

    def use(self, name: Hashable, num_tokens: float) -> None:
        """Use a prefix or the rest of a prompt, which takes pages for so many tokens."""
        if name in self._sizes:
            self._sizes.move_to_end(name)
            return
        self._sizes[name] = num_tokens
        self._num_free -= num_tokens
        while self._num_free < 0 and len(self._sizes) > 1:
            _name, freed = self._sizes.popitem(last=False)
            self._num_free += freed


class CachedPrefix(NamedTuple):
    """What will be cached of a waiting prompt.

    Attributes:
        num_tokens: number of its tokens that are cached, whatever others compute.
        num_led: number of its first tokens that are cached once `leader` has computed them.
        leader: a prompt ahead of it; None: none has more in common with it than what is cached.
    """

    num_tokens: int
    num_led: int = 0
    leader: Request | None = None


class SharedPrefixes:
    """The prefixes of prompts that are cached, or about to be.

    Args:
        core: the pages and the prefix tree.
        partial: the prompts that are partly computed.
    """

    def __init__(self, core: SchedulerCore, partial: Iterable[Request]) -> None:
        self._core = core
        self._page_size = core.kv.page_size
        self._num_available = core.kv.num_available * self._page_size
        self._uses = _RecentUses(core.kv.num_tokens)
        self._was_cached: set[Node] = set()
        self._num_reused = 0  # tokens of prefixes that the tree has now
        self._num_new = 0.0  # tokens for which the prompts up to now take pages
        self._ages = Spread()
        self._leaders: dict[tuple[Node, bytes], list[Request]] = {}
        for request in partial:
            self._add_partial(request)

    def prefix_of(self, request: Request, num_growing: float) -> CachedPrefix:
        """Return what will be cached of the next request of the queue.

        Args:
            request: it waits.
            num_growing: number of tokens beyond its prompt for which it takes pages.
        """
        num_cached, node = self._core.kv.num_cached_tokens(request), request.prefix_node
        num_matched = 0 if node is None else node.depth * self._page_size
        if node is not None and num_cached and not self._stays(node, num_matched):
            num_cached = 0
        prefix = CachedPrefix(num_cached)
        if node is not None and request.prefix_miss:
            prefix = self._follow(request, num_cached, node, request.prefix_miss)
        if node is not None and num_matched:
            self._uses.use(node, num_matched)
        if prefix.leader is not None:
            self._uses.use(prefix.leader.seq, 0)
        num_cached = max(prefix.num_tokens, prefix.num_led)
        num_known = request.num_known_tokens
        self._uses.use(request.seq, num_known - max(num_matched, num_cached) + num_growing)
        self._num_new += num_known - num_cached + num_growing
        return prefix

    def _stays(self, node: Node, num_tokens: int) -> bool:
        """Return whether the tree will still have a prefix that it has now.

        Used for longer than a share of the available pages, it is evicted when as many have been
        taken, without those that prefixes among them have, which are used again.
        """
        if node in self._was_cached:
            return node in self._uses
        self._was_cached.add(node)
        share = 1.0 if node.ref_count else self._ages.next()
        stays = self._num_new <= share * (self._num_available - self._num_reused)
        self._num_reused += num_tokens if stays else 0
        return stays

    def _add_partial(self, request: Request) -> None:
        """Take in a prompt that is partly computed: others may wait for the rest of it."""
        path, kv = request.prefix_path, self._core.kv
        node = path[-1] if path else kv.tree.root
        has_more = request.num_known_tokens >= (node.depth + 1) * self._page_size
        if has_more and not request.computes_all:
            self._leaders[node, kv.page_key(request, node.depth)] = [request]
            self._uses.use(request.seq, request.num_known_tokens)

    def _follow(
        self, request: Request, num_cached: int, node: Node, next_page: bytes
    ) -> CachedPrefix:
        """Let a prompt follow the one that computes most of its prefix, if there is one."""
        leaders = self._leaders.setdefault((node, next_page), [])
        leaders[:] = [leader for leader in leaders if leader.seq in self._uses]
        num_pages, followed = num_cached // self._page_size, None
        for leader in leaders:
            num_common = _num_common_pages(request, leader, self._page_size, node.depth + 1)
            if num_common > num_pages:
                followed, num_pages = leader, num_common
        if len(leaders) < MAX_LEADERS:
            leaders.append(request)
        return CachedPrefix(num_cached, num_pages * self._page_size, followed)


def _num_common_pages(request: Request, leader: Request, page_size: int, num_equal: int) -> int:
    """Return how many first pages two prompts have in common; `num_equal` are known to be."""
    limit = min(request.num_known_tokens - 1, leader.num_known_tokens) // page_size
    one, other = memoryview(request.tokens), memoryview(leader.tokens)
    while num_equal < limit:
        middle = (num_equal + limit + 1) // 2
        begin, end = num_equal * page_size, middle * page_size
        if one[begin:end] == other[begin:end]:
            num_equal = middle
        else:
            limit = middle - 1
    return num_equal


# The requests, slots and pages of a simulation, as the planner uses them.

_NO_PARAMS = SamplingParams(max_new_tokens=1, seed=0)
# The planner only counts decode rows, so all are of one request.
DECODE_ROW = Request.from_submit(-1, Submit(b"", "", b"", _NO_PARAMS, False, 0.0, 0.0), frozenset())

_values_of = attrgetter(*(field.name for field in fields(Request)))


def copy_of(request: Request) -> Request:
    """Return a shallow copy, in a third of the time that `copy.copy` takes."""
    return Request(*_values_of(request))


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """What happens to a request that waits or is partly computed.

    Attributes:
        prefix: what will be cached of it.
        num_decode_steps: decode steps that it has after its prompt.
        num_held_tokens: tokens of KV that it is given when it is admitted, and frees at its end,
            with those that it is expected to generate.
        admitted_s: seconds until it is admitted; None: it is not yet.
        first_token_s: seconds until its first token; None: it has none yet.
    """

    prefix: CachedPrefix
    num_decode_steps: int
    num_held_tokens: float
    admitted_s: float | None = None
    first_token_s: float | None = None


class SimulatedQueue:
    """The waiting requests of a simulation, which are copied when they are looked at.

    A queue of which a step could admit none is not looked at again with as few prompt tokens,
    until a request has its first token or ends.

    Args:
        core: where they wait.
        requests: in the order of admission.
    """

    def __init__(self, core: SchedulerCore, requests: list[Request]) -> None:
        self.lookahead = core.waiting.lookahead
        self._kv = core.kv
        self._requests = requests
        self._num_copied = 0
        self._copies: dict[int, Request] = {}
        self._tried_budget = 0

    def __len__(self) -> int:
        return len(self._copies) + len(self._requests) - self._num_copied

    def first(self, count: int, budget: int) -> list[Request]:
        """Return copies of the next requests; none where such a step was tried in vain."""
        if count > 1:  # it is a try to admit some
            if budget <= self._tried_budget:
                return []
            self._tried_budget = budget
        while self._num_copied < len(self._requests) and len(self._copies) < count:
            request = self._requests[self._num_copied]
            self._kv.match_prefix(request)  # of the request itself: the next forecast has it, too
            self._copies[request.seq] = copy_of(request)
            self._num_copied += 1
        return list(islice(self._copies.values(), count))

    def take(self, request: Request) -> None:
        """Remove a request that is admitted."""
        del self._copies[request.seq]
        self.try_again()

    def try_again(self) -> None:
        """Let the queue be looked at, whatever was tried in vain."""
        self._tried_budget = 0

    def may_admit(self, budget: int) -> bool:
        """Return whether a step with so many prompt tokens looks at the queue."""
        return len(self) > 0 and budget > self._tried_budget


class SimulatedParts:
    """Slots and pages as they are now, and copies of the requests (`PlanParts`).

    Args:
        core: what the simulation begins with. It is not changed.
        ends: answers that ended lately.
        time: the time of the simulation, and the requests that decode.
        waiting: the waiting requests, in the order of admission.

    Attributes:
        waiting: the requests that wait.
        partial: the requests of whose prompts only a part is computed, by number.
        requests: what happens to those that were looked at, by number.
    """

    def __init__(
        self, core: SchedulerCore, ends: RecentEnds, time: SimulatedTime, waiting: list[Request]
    ) -> None:
        self._core = core
        self._ends = ends
        self._time = time
        self._ratio = core.admission.ratio.value
        self._lengths = Spread()
        self._page_size = core.kv.page_size
        self._num_free_tokens = float(core.kv.num_available * core.kv.page_size)
        self._complete: list[SimulatedRequest] = []
        self.num_free_slots = core.admission.num_free_slots
        self.offload = NoOffload()  # loads are not foreseen
        self.requests: dict[int, SimulatedRequest] = {}
        self.partial: dict[int, Request] = {}
        for request in core.admission.holders.values():
            self._add_holder(request)
        self.waiting = SimulatedQueue(core, waiting)
        self._prefixes = SharedPrefixes(core, self.partial.values())

    def _add_holder(self, request: Request) -> None:
        """Add a request that has a slot."""
        num_growing = self._num_growing(request)
        self._num_free_tokens -= num_growing
        num_held = self._ends.uncached_share * request.num_known_tokens + num_growing
        num_left = self._draw_length(request) - request.num_generated
        if request.seq in self._core.running.partial:
            copy = self.partial[request.seq] = copy_of(request)
            self.requests[copy.seq] = SimulatedRequest(CachedPrefix(0), num_left - 1, num_held)
        else:
            has_ended = request.status >= RequestStatus.RETRACTED
            self._time.add_running(0 if has_ended else num_left, num_held)

    def _add_waiting(self, request: Request) -> SimulatedRequest:
        """Add the next request of the queue."""
        num_growing = self._num_growing(request)
        prefix = self._prefixes.prefix_of(request, num_growing)
        num_held = request.num_known_tokens - max(prefix.num_tokens, prefix.num_led) + num_growing
        num_steps = self._draw_length(request) - request.num_generated - 1
        simulated = SimulatedRequest(prefix, num_steps, num_held)
        self.requests[request.seq] = simulated
        return simulated

    def _num_growing(self, request: Request) -> float:
        """Return the tokens for which a request is expected to take further pages."""
        return self._ratio * min(request.num_remaining_tokens, admission.MAX_EXPECTED_TOKENS)

    def _draw_length(self, request: Request) -> int:
        """Return the length of an answer."""
        limit = request.max_total_tokens - request.num_prompt
        if not request.can_stop:
            return limit
        return self._ends.length(request.num_generated, limit, self._lengths.next())

    # --- what the planner asks and does -----------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Number of decode rows of the next step."""
        return self._time.num_decodes

    @property
    def has_staying_rows(self) -> bool:
        """Whether a request decodes now that does not go on at another replica at once."""
        return not all(request.will_soon_leave for request in self._core.running)

    def num_admissible(self, width: int) -> int:
        """Return how many requests may enter now, at most `width`."""
        return min(width, self.num_free_slots)

    def num_cached_tokens(self, request: Request) -> int:
        """Return how many tokens of a waiting request are cached."""
        simulated = self.requests.get(request.seq) or self._add_waiting(request)
        num_tokens, num_led, leader = simulated.prefix
        if leader is None:
            return num_tokens
        num_computed = min(num_led, leader.num_computed_tokens)
        return max(num_tokens, num_computed // self._page_size * self._page_size)

    def expected_tokens(self) -> int:
        """Return 0: what others will take is not among the free tokens."""
        return 0

    def num_growing(self, request: Request) -> int:  # noqa: ARG002
        """Return 0, as `expected_tokens`."""
        return 0

    def can_admit(self, request: Request, expected: int, plan: Plan) -> bool:  # noqa: ARG002
        """Return whether a request has room; without others beside it, it always has."""
        is_alone = not (self._time.num_running or self.partial or plan.batch.num_prompts)
        return is_alone or self.requests[request.seq].num_held_tokens <= self._num_free_tokens

    def admit(self, request: Request, plan: Plan, now: float) -> None:  # noqa: ARG002
        """Give a slot and tokens of KV to a request."""
        simulated = self.requests[request.seq]
        simulated.admitted_s = now
        request.num_computed_tokens = self.num_cached_tokens(request)
        self.num_free_slots -= 1
        self._num_free_tokens -= simulated.num_held_tokens

    def preempt_partial(self, first: list[Request], plan: Plan) -> None:
        """Do nothing: no slot is taken from others."""

    def grow_prompt(self, request: Request, count: int, plan: Plan, may_retract: bool) -> int:  # noqa: ARG002
        """Return `count`: a request has all of its tokens of KV when it is admitted."""
        return count

    def on_part(self, request: Request, samples: bool) -> None:
        """Note that a part of a prompt is computed. samples: it is the last one."""
        if samples:
            self.partial.pop(request.seq, None)
            self._complete.append(self.requests[request.seq])
        else:
            self.partial[request.seq] = request

    # --- what happens in a step -------------------------------------------------------------------

    def end_due(self) -> None:
        """Let the requests end that have all of their tokens."""
        for end in self._time.end_due():
            self.num_free_slots += 1
            self._num_free_tokens += end.num_tokens
            self.waiting.try_again()

    def start_decoding(self) -> None:
        """Let the requests have their first tokens whose prompts the last step has completed."""
        for simulated in self._complete:
            simulated.first_token_s = self._time.seconds
            self._time.add_running(simulated.num_decode_steps, simulated.num_held_tokens)
            self.waiting.try_again()
        self._complete.clear()


# When waiting requests will probably be admitted and have their first tokens.
#
# Steps are simulated one after the other: the core's planner composes them, and they take as long
# as the last ones have taken. Running requests end after the lengths that recent answers had, or at
# their max_new_tokens; each end makes room for the next requests of the queue.
#
# It is a single future, with lengths that are spread evenly over those of recent answers, so that
# the first of many ends comes early, as it does. Steps that are alike are simulated at once.
# Requests that arrive later are not foreseen.

MAX_STEPS = 300  # that are simulated, in 20 ms or so
MAX_ALIKE_STEPS = 8  # that are simulated at once: a prompt's later tokens take longer


class WaitForecast:
    """One future of the waiting queue, from now on.

    Args:
        core: the queue, the running batch and the pages as they are.
        ends: answers that ended lately.
        step_seconds: how long steps take.
        requests: waiting requests, in the order of admission.

    Attributes:
        num_steps: number of steps that were simulated.
    """

    def __init__(
        self,
        core: SchedulerCore,
        ends: RecentEnds,
        step_seconds: StepSeconds,
        requests: list[Request],
    ) -> None:
        self._core = core
        self._time = SimulatedTime(core, step_seconds)
        self._parts = SimulatedParts(core, ends, self._time, requests)
        self._time.begin_in_step(bool(self._parts.partial))
        self._planner = core.prefill.over(self._parts)
        self.num_steps = 0

    def wait_s(self, request: Request) -> float | None:
        """Return the seconds until a request is admitted; None: unknown."""
        simulated = self._parts.requests.get(request.seq)
        return None if simulated is None else simulated.admitted_s

    def first_token_s(self, request: Request) -> float | None:
        """Return the seconds until a request has its first token; None: unknown."""
        simulated = self._parts.requests.get(request.seq)
        return None if simulated is None else simulated.first_token_s

    @property
    def seconds(self) -> float:
        """Seconds that were simulated."""
        return self._time.seconds

    def run(self, until: Request | None = None) -> None:
        """Simulate steps until all requests are admitted, or one of them has its first token."""
        if not self._time.is_known:
            return
        while self.num_steps < MAX_STEPS and self._goes_on(until):
            self.num_steps += 1
            self._parts.end_due()
            batch = self._plan_step()
            if batch.num_prompts:
                self._run_step(batch)
            elif self._time.num_running:
                self._time.pass_decodes()
            else:
                return  # what waits never fits

    def _goes_on(self, until: Request | None) -> bool:
        return len(self._parts.waiting) > 0 if until is None else self.first_token_s(until) is None

    def _plan_step(self) -> ScheduleBatch:
        """Return the next step; without prompts where a running request has to end first."""
        plan = Plan(in_flight=False)
        mode, num_rows = self._core.mode, self._parts.num_rows
        if mode.admits(self._time.num_running, self._core.running.width):
            if mode is BatchMode.MIXED:
                plan.batch = ScheduleBatch(
                    [DECODE_ROW] * num_rows, [1] * num_rows, num_decodes=num_rows
                )
            self._planner.add_prompts(plan, self._time.seconds)
        return plan.batch

    def _run_step(self, batch: ScheduleBatch) -> None:
        """Let the time of a step pass, and of those like it that follow."""
        num_alike = self._num_alike(batch)
        if num_alike > 1:
            batch.extend_prefill(batch.requests[-1], (num_alike - 1) * batch.num_tokens[-1])
        self._time.pass_prompts(batch, num_alike, bool(self._parts.partial))
        self._parts.start_decoding()

    def _num_alike(self, batch: ScheduleBatch) -> int:
        """Return how many steps go on with one prompt alone, as this one does."""
        parts, budget = self._parts, self._planner.budget.tokens
        request, count = batch.requests[-1], batch.num_tokens[-1]
        is_alone = batch.num_prompts == 1 and list(parts.partial) == [request.seq]
        begins = parts.requests[request.seq].admitted_s == self._time.seconds
        may_admit = (
            parts.num_free_slots
            and parts.waiting.may_admit(budget)
            and self._planner.sharing.may_admit(1)
        )
        if not is_alone or begins or may_admit:
            return 1
        num_alike = min(MAX_ALIKE_STEPS, 1 + (request.num_uncomputed_tokens - 1) // count)
        until_end = self._time.steps_until_end if self._time.num_running else MAX_ALIKE_STEPS
        return max(1, min(num_alike, int(until_end)))


# When a request that arrives now has its first token, so that a target is refused that fails.

MAX_LOOKED_AT = 256  # requests of the queue that are looked at
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
    """Return the waiting requests that go first, at most MAX_LOOKED_AT; None: unknown.

    By other orders than that of due times, such as turns of tenants, it may be any of them.
    """
    queue = core.waiting
    if not len(queue):
        return []
    if not isinstance(queue, policies.SortedQueue) or not queue.orders_by_due_time:
        return None
    queued, key = queue.first(MAX_LOOKED_AT, core.prefill.budget.tokens), queue.key(request)
    return list(takewhile(lambda other: queue.key(other) < key, queued))


def _ttft_s(core: SchedulerCore, ends: RecentEnds, request: Request, ahead: list[Request]) -> float:
    """Return the seconds until a request has its first token; at least so many if that is far."""
    forecast = WaitForecast(core, ends, core.costs.seconds, [*ahead, request])
    forecast.run(until=request)
    first_token_s = forecast.first_token_s(request)
    return forecast.seconds if first_token_s is None else first_token_s


def _prompt_alone_s(core: SchedulerCore, request: Request) -> float:
    """Return the seconds in which a prompt is computed beside nothing else."""
    num_cached = core.kv.num_cached_tokens(request)
    count = request.num_known_tokens - num_cached
    pairs = count * num_cached + count * (count + 1) // 2
    num_steps = math.ceil(count / core.prefill.budget.tokens)
    return core.costs.seconds(0, count, pairs) + (num_steps - 1) * core.costs.seconds(0)
