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

import math
from typing import NamedTuple

from quadriga.server.config.engine_args import BY_CACHE, CountOrAuto, SchedulerArgs
from quadriga.wire.to_detok import PromptWork, ReplicaNews
from tokenizer_proc.replicas import role_policy
from tokenizer_proc.replicas.role_policy import FollowPrompts, RoleLoad, RolePolicy
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
        policy: decides how many there are from then on; None: as many as at first.
    """

    num_prefill: int
    max_running: int
    policy: RolePolicy | None = None


def roles_of(prefill_replicas: CountOrAuto, num_replicas: int, limits: SchedulerArgs) -> Roles:
    """Return the roles that the flags ask for.

    Args:
        prefill_replicas: the flag.
        num_replicas: number of all replicas.
        limits: of each scheduler.
    """
    max_running = limits.max_running_requests
    if isinstance(prefill_replicas, int):
        return Roles(prefill_replicas, max_running)
    target_s = None if limits.itl_target is None else limits.itl_target / 1000
    return Roles(0, max_running, FollowPrompts(num_replicas, target_s))


class RoleRouter(Router[KeyT]):
    """Choose replicas by their roles.

    Args:
        roles: which replica has which role.
        method, num_replicas, block_tokens, page_size, max_waiting: as in Router.

    Attributes:
        num_prefill: how many replicas compute prompts for the others now: the first ones.
        num_changes: how often this number has changed.
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
        self._policy = roles.policy
        self._work = [PromptWork()] * num_replicas
        self._looked_at = -math.inf
        self._num_apart = self._num_handed_over = 0
        self.num_changes = 0
        self._set_roles(roles.num_prefill)

    def _set_roles(self, num_prefill: int) -> None:
        num_replicas = len(self._work)
        self.num_prefill = num_prefill
        self._prefill = frozenset(range(num_prefill))
        self._decode = frozenset(range(num_prefill, num_replicas))

    def on_news(self, replica: int, news: ReplicaNews) -> None:
        """Take in the blocks and pages that a replica has, and its work with prompts."""
        super().on_news(replica, news)
        self._work[replica] = news.work

    def follow_load(self, now: float) -> bool:
        """Change the roles by the policy, at most every INTERVAL_S. Return whether they changed.

        Args:
            now: seconds, of any clock that does not go back.
        """
        if self._policy is None or now - self._looked_at < role_policy.INTERVAL_S:
            return False
        self._looked_at = now
        work = self._work
        load = RoleLoad(
            prompt_s=sum(one.seconds for one in work),
            prompt_tokens=sum(one.num_tokens for one in work),
            page_tokens=self._page_size,
            page_s=min((one.page_s for one in work if one.page_s), default=0.0),
            num_apart=self._num_apart,
            num_handed_over=self._num_handed_over,
            num_rows=sum(one.num_rows for one in work),
            rows_s=sum(one.rows_s for one in work),
            shortest_s=min((one.shortest_s for one in work if one.num_rows), default=0.0),
            num_waiting_tokens=sum(one.num_prefill_tokens for one in self.ledger.loads),
        )
        num_prefill = self._policy.decide(load, now)
        if num_prefill == self.num_prefill:
            return False
        self._set_roles(num_prefill)
        self.num_changes += 1
        return True

    def choose(self, prompt: Prompt) -> Routed:
        """Choose the replica at which a request begins, or goes on after a loss."""
        prefill, decode = self._up(self._prefill), self._up(self._decode)
        if not (prefill and decode):
            return super().choose(prompt)
        weight = COPIED_WEIGHT if prompt.goes_on else UNCACHED_WEIGHT
        here = self.choose_among(prompt, self._all_but(decode), weight)
        if prompt.goes_on:
            return here
        there = self.choose_among(prompt, self._all_but(prefill), group=PREFILL)
        if self.stays_here(prompt, here, there):
            return here
        self._num_apart += not prompt.ends_at_once
        return there

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

    def hands_over(self, replica: int) -> bool:
        """Return whether requests go on elsewhere when this replica has computed their prompts."""
        return replica in self._prefill

    def has_next(self, num_tokens: int, replica: int) -> bool:
        """Return whether `find_next` would return a replica for so many tokens."""
        return replica in self._prefill and bool(self._with_room(num_tokens))

    def find_next(self, prompt: Prompt, replica: int) -> Routed | None:
        """Return where a request goes on whose prompt a replica has computed; None: it stays.

        It stays as long as no other replica has a slot and free pages for it.
        """
        if not self.has_next(prompt.num_tokens, replica):
            return None
        ready = self._with_room(prompt.num_tokens)
        self._num_handed_over += 1
        return self.choose_among(prompt, self._all_but(ready), COPIED_WEIGHT)

    def choose_ahead(self, prompt: Prompt, replica: int, before: int | None) -> int | None:
        """Return where pages are loaded of a prompt that a replica computes; None: nowhere.

        The request will go on there, unless another replica has much less to do by then.

        Args:
            prompt: what is known of the request.
            replica: computes the prompt.
            before: where its first pages were loaded; None: nowhere.
        """
        if prompt.ends_at_once or self._method != BY_CACHE:  # else no page draws a request
            return None
        ready = self._with_room(prompt.num_tokens) if replica in self._prefill else set()
        if before in ready or not ready:
            return before if before in ready else None
        return self.choose_among(prompt, self._all_but(ready), COPIED_WEIGHT).replica

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
