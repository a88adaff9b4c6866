"""How the prompts that are under way, and those that wait, share the prompt tokens of a step.

The rule is shortest remaining processing time with a reserved share. A step's tokens go to short
prompts first, so that they pass a long one: of all orders this has the smallest mean time to the
first token (Schrage, 1968), and the lengths of prompts are known. Alone it would starve the long
ones. So the prompt that is under way for longest has OLDEST_SHARE of the steps, whatever arrives:
it takes at most 1 / OLDEST_SHARE times as long as without others. What it had beyond its share, of
at most MAX_LEAD_STEPS steps, newcomers may take at once: a few of them have a whole step. What one
side leaves, the other has, so that no step is smaller than without sharing.

A prompt passes those that arrived before it only if fewer tokens of it are left. Two long prompts
are therefore not computed in turns, which would delay the first and help neither. A prompt whose
next tokens another one is about to compute waits for them instead of computing them again.
"""

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol, TypeVar

from quadriga.config.scheduler_args import SchedulerArgs
from scheduler_proc.prefill.budget import PrefillBudget as Budget

OLDEST_SHARE = 0.5  # of the prompt tokens
MAX_LEAD_STEPS = 2.0
MIN_DIVIDED_TOKENS = 32  # a step of fewer prompt tokens goes to one prompt
# Requests of the queue that are looked at beyond those which a step may admit.
NUM_LOOKED_AT = 32
# A prompt waits for common tokens that are so many of those that it would have to compute.
MIN_COMMON_SHARE = 0.5


class SharedPrompt(Protocol):
    """A prompt that waits or is partly computed. The attributes mean what they mean in Request."""

    @property
    def seq(self) -> int:
        """Its number."""

    @property
    def due_at(self) -> float:
        """When its first token is due."""

    @property
    def priority(self) -> int:
        """Its priority."""

    @property
    def is_background(self) -> bool:
        """Whether it runs only as far as others leave room."""

    @property
    def tokens(self) -> "array[int]":
        """Its token ids."""

    @property
    def cache_salt(self) -> bytes:
        """What its cached pages are kept apart by."""

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether all of it has to be computed."""

    @property
    def num_known_tokens(self) -> int:
        """Number of its tokens."""

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of them that are not computed yet."""


class PromptRows(Protocol):
    """The rows of a step, as ScheduleBatch has them."""

    @property
    def requests(self) -> Sequence[SharedPrompt]:
        """The request of each row."""

    @property
    def num_tokens(self) -> Sequence[int]:
        """Number of tokens of each row."""

    @property
    def num_prompts(self) -> int:
        """Number of rows of prompts."""


P = TypeVar("P", bound=SharedPrompt)


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
        self, partial: Collection[P], alone: int, budget: Budget, waiting: list[P]
    ) -> list[tuple[P, int]]:
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
        parts: list[tuple[P, int]] = []
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

    def end_step(self, batch: PromptRows, partial: Collection[SharedPrompt]) -> None:
        """Take in what the oldest prompt under way has got of a step."""
        oldest = self._oldest
        if oldest is None or not batch.num_prompts:
            return
        rows = zip(batch.requests, batch.num_tokens, strict=True)
        count = sum(count for request, count in rows if request.seq == oldest)
        lead = self._lead + count / max(self._alone, 1) - OLDEST_SHARE
        self._lead = min(max(lead, 0.0), MAX_LEAD_STEPS)
        if all(request.seq != oldest for request in partial):
            self._oldest = None

    def last_parts(self, partial: Iterable[P]) -> list[P]:
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
        self,
        request: SharedPrompt,
        num_uncached: int,
        budget: int,
        partial: Collection[SharedPrompt],
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
        if num_uncached > budget and len(partial) >= self._max_partial:
            return True
        return any(self.goes_first(other, request, num_uncached) for other in partial)

    def goes_first(self, other: SharedPrompt, request: SharedPrompt, num_uncached: int) -> bool:
        """Return whether a partly computed prompt goes before a waiting request."""
        if self._rank(other) != self._rank(request):
            return self._rank(other) > self._rank(request)
        if age_of(other) > age_of(request):
            return False
        return other.num_uncomputed_tokens <= num_uncached or (
            self._caches_prefixes and _computes_beginning(other, request, num_uncached)
        )

    def _rank(self, request: SharedPrompt) -> int:
        """Return the priority as far as it counts: without the policy, only the background does."""
        return request.priority if self._by_priority else -int(request.is_background)


def age_of(request: SharedPrompt) -> tuple[float, int]:
    """Return what orders requests by age: when their first tokens are due, then their arrival."""
    return request.due_at, request.seq


def _computes_beginning(other: SharedPrompt, request: SharedPrompt, num_uncached: int) -> bool:
    """Return whether `other` is about to compute most of a waiting request's uncached tokens."""
    if request.wants_prompt_logprobs or other.cache_salt != request.cache_salt:
        return False
    start = request.num_known_tokens - num_uncached
    end = start + max(int(MIN_COMMON_SHARE * num_uncached), 1)
    if end > len(other.tokens) or other.tokens[start] != request.tokens[start]:
        return False
    return other.tokens[:end].tobytes() == request.tokens[:end].tobytes()
