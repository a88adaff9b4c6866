"""The choice of a replica where some compute prompts for the others (--prefill-replicas).

A replica of either role is a whole one: where none of the other role is left, it does all of the
work, and a request may stay at the replica that has computed its prompt as long as it likes.

A prompt is computed at a replica of the first role, unless its first token comes sooner at one of
the others, so much sooner that it is worth the time for which the streams there wait for theirs.
Both are counted in prompt tokens:

    here  = prompt tokens that wait here + uncached prompt tokens
    there = prompt tokens that wait there + uncached prompt tokens + HAND_OVER_TOKENS
    harm  = open choices here, MAX_HARMED at most * (uncached prompt tokens - FREE_TOKENS)

"Here" is the best replica that generates tokens, "there" the best one that computes prompts. The
prompt stays here if here + harm <= there. Nothing is handed over of a request that ends with its
first token, or with a vector.
"""

from typing import NamedTuple

from tokenizer_proc.replicas.router import (
    UNCACHED_WEIGHT,
    KeyT,
    Prompt,
    Routed,
    Router,
)

# What it costs a request to change its replica: messages, and the pages of the last step.
HAND_OVER_TOKENS = 64
# So many tokens of a prompt fit into a step of other requests without making it much longer.
FREE_TOKENS = 64
# Streams that a prompt makes wait count up to this number, so that the queue of prompts is bounded.
MAX_HARMED = 8
# A token whose keys and values are copied, beside one that is computed.
COPIED_WEIGHT = 0.1


# The replicas of the first role have turns of their own.
PREFILL = 1


class Roles(NamedTuple):
    """How many replicas compute prompts, and how many requests run at one.

    Attributes:
        num_prefill: the first ones compute prompts for the others.
        max_running: choices that have a slot at a replica.
    """

    num_prefill: int
    max_running: int


class RoleRouter(Router[KeyT]):
    """Choose replicas by their roles.

    Args:
        roles: which replica has which role.
        method, num_replicas, block_tokens, page_size, max_waiting: as in Router.
    """

    has_roles = True

    def __init__(
        self,
        roles: Roles,
        method: str,
        num_replicas: int,
        block_tokens: int,
        page_size: int,
        max_waiting: int,
    ) -> None:
        super().__init__(method, num_replicas, block_tokens, page_size, max_waiting)
        self._max_running = roles.max_running
        self._prefill = frozenset(range(roles.num_prefill))
        self._decode = frozenset(range(roles.num_prefill, num_replicas))

    def choose(self, prompt: Prompt) -> Routed:
        """Choose the replica at which a request begins, or goes on after a loss."""
        prefill, decode = self._up(self._prefill), self._up(self._decode)
        if not (prefill and decode):
            return super().choose(prompt)
        weight = COPIED_WEIGHT if prompt.goes_on else UNCACHED_WEIGHT
        here = self.choose_among(prompt, self._all_but(decode), weight)
        if prompt.goes_on or prompt.stays:
            return here
        there = self.choose_among(prompt, self._all_but(prefill), group=PREFILL)
        return here if self.stays_here(prompt, here, there) else there

    def stays_here(self, prompt: Prompt, here: Routed, there: Routed) -> bool:
        """Return whether a prompt is computed where tokens are generated.

        Args:
            prompt: what is known of the request.
            here: the best replica that generates tokens.
            there: the best one that computes prompts.
        """
        loads, num_tokens = self.ledger.loads, prompt.num_tokens
        num_uncached = num_tokens - here.num_cached
        wait_here = loads[here.replica].num_prefill_tokens + num_uncached
        wait_there = loads[there.replica].num_prefill_tokens + num_tokens - there.num_cached
        num_streams = min(MAX_HARMED, loads[here.replica].num_open)
        harm = num_streams * max(0, num_uncached - FREE_TOKENS)
        if prompt.ends_at_once:
            return wait_here + harm < wait_there
        return wait_here + harm <= wait_there + HAND_OVER_TOKENS

    def has_next(self, num_tokens: int, replica: int) -> bool:
        """Return whether `find_next` would return a replica for so many tokens."""
        return replica in self._prefill and bool(self._with_room(num_tokens))

    def find_next(self, prompt: Prompt, replica: int) -> Routed | None:
        """Return where a request goes on whose prompt a replica has computed; None: it stays.

        It stays as long as no other replica has a slot and free pages for it.
        """
        if prompt.stays or not self.has_next(prompt.num_tokens, replica):
            return None
        ready = self._with_room(prompt.num_tokens)
        return self.choose_among(prompt, self._all_but(ready), COPIED_WEIGHT)

    def _with_room(self, num_tokens: int) -> set[int]:
        """Return the replicas that generate tokens and have room for so many."""
        return {number for number in self._up(self._decode) if self._has_room(num_tokens, number)}

    def _has_room(self, num_tokens: int, replica: int) -> bool:
        """Return whether a replica has a slot and pages, beside what is on its way there."""
        load = self.ledger.loads[replica]
        if load.num_open == 0 or load.num_available < 0:
            return True
        room = load.num_available * self._page_size - load.num_prefill_tokens
        return num_tokens <= room and load.num_open < self._max_running

    def _up(self, numbers: frozenset[int]) -> set[int]:
        """Return the replicas among these that take requests."""
        return {number for number in numbers if self.is_up(number)}

    def _all_but(self, numbers: set[int]) -> set[int]:
        return set(self._prefill | self._decode) - numbers
