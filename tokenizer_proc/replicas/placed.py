"""A request at its replicas: the owner of each choice, open or ended, and its tokens there."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from quadriga.server.prefix_blocks import block_hashes
from quadriga.wire.packing import num_ids, pack_ids, unpack_ids
from quadriga.wire.to_detok import MovableChoice
from quadriga.wire.to_scheduler import ChoiceProgress, LoadAhead, Submit
from tokenizer_proc.replicas.router import Prompt

Name = tuple[bytes, str]
NEVER_PLACED = -1


class ChoiceOwner(NamedTuple):
    """The replica that has a choice.

    Attributes:
        placement: number of the last placement of the choice there, as in Submit.
        since: number of the first one of its stay there.
    """

    replica: int
    placement: int
    since: int


class RouterKey(NamedTuple):
    """What the router counts as one: the choices of a request that are placed together."""

    client: bytes
    request_id: str
    since: int


@dataclass(slots=True)
class PlacedChoice:
    """A choice of an open request.

    Only results of its owner count, the replica at which it was placed last.

    Attributes:
        replica: the owner; None while the choice waits for one.
        placement: number of its last placement; NEVER_PLACED before the first one. Its end is that
            of this placement: its client may ignore an earlier one, since it has asked again.
        since: number of the first placement of its stay at the owner, from which on results count.
        has_ended: its end was passed on. Its owner can replay it.
        ends_at_owner: it has ended, but its client has asked for it again, and the owner does not
            know that yet.
        seq: the owner's scheduler's number; -1 while it is not known.
        token_ids: every token that was generated. It is noted here before its text goes out.
        first_token_at: Unix seconds; 0.0 without a token.
        admitted_at, cached_tokens: as in MovableChoice, of the replica that computed its prompt.
    """

    replica: int | None = None
    placement: int = NEVER_PLACED
    since: int = NEVER_PLACED
    has_ended: bool = False
    ends_at_owner: bool = False
    seq: int = -1
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    first_token_at: float = 0.0
    admitted_at: float = 0.0
    cached_tokens: int = 0

    @property
    def owner(self) -> ChoiceOwner | None:
        """Where the choice is; None while it waits for a replica."""
        return (
            None if self.replica is None else ChoiceOwner(self.replica, self.placement, self.since)
        )

    def give_to(self, owner: ChoiceOwner) -> None:
        """Take in where the choice is from now on."""
        self.replica, self.placement, self.since = owner
        self.ends_at_owner = False

    def progress(self, index: int, facts: MovableChoice | None = None) -> ChoiceProgress:
        """Return how far it is, for another scheduler.

        Args:
            index: its own.
            facts: what the replica has sent at which it is.
        """
        return ChoiceProgress(
            index,
            pack_ids(self.token_ids),
            self.first_token_at,
            self.admitted_at,
            self.cached_tokens,
            [] if facts is None else facts.logprobs,
            [] if facts is None else facts.prompt_logprobs,
            [] if facts is None else facts.spans,
        )

    def leave_replica(self) -> None:
        """Take in that its replica has it no more."""
        self.replica, self.seq = None, -1

    def end(self) -> None:
        """Take in that its end was passed on."""
        self.has_ended, self.seq, self.token_ids = True, -1, array("i")


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request from its Submit to the end of its last choice.

    Attributes:
        submit: None where its client has not sent it again to a frontend that was restarted.
        choices: by index; without a Submit as far as anything is known of them.
        aborted_by: as in AbortRequest; "" if it was not aborted.
        keep_s: as in Generate.
        is_lost: it was aborted because its client's connection was lost: its end is for no client.
        num_losses: number of replicas that were lost while they had it.
        is_moving: it was at a replica before.
        waits: its client has sent it again, and its owners do not know that yet.
        ahead: replica that loads the pages of its prompt while another one computes it.
    """

    name: Name
    submit: Submit | None = None
    choices: dict[int, PlacedChoice] = field(default_factory=dict)
    aborted_by: str = ""
    keep_s: float | None = None
    is_lost: bool = False
    num_losses: int = 0
    is_moving: bool = False
    waits: bool = False
    ahead: int | None = None

    def choice(self, index: int) -> PlacedChoice:
        """Return what is known of a choice."""
        return self.choices.setdefault(index, PlacedChoice())

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended, or all that are known of a request without a Submit."""
        return all(choice.has_ended for choice in self.choices.values())

    @property
    def is_open(self) -> bool:
        """Whether its client waits for it."""
        return self.submit is not None and not self.is_lost and not self.has_ended

    @property
    def homeless(self) -> list[int]:
        """Indexes of the open choices that are at no replica."""
        return [i for i, c in self.choices.items() if c.replica is None and not c.has_ended]

    def open_by_owner(self) -> dict[ChoiceOwner, list[int]]:
        """Return the indexes of the open choices at each owner."""
        indexes: dict[ChoiceOwner, list[int]] = {}
        for index, choice in self.choices.items():
            if choice.owner is not None and not choice.has_ended:
                indexes.setdefault(choice.owner, []).append(index)
        return indexes

    def is_at(self, number: int) -> bool:
        """Return whether a replica owns an open choice."""
        return any(c.replica == number and not c.has_ended for c in self.choices.values())

    def prompt(self, block_tokens: int, indexes: Sequence[int] = (0,)) -> Prompt:
        """Return what the router has to know of some choices of the request.

        Args:
            block_tokens: tokens of a block of the router's index; 0: it has none.
            indexes: of the choices.
        """
        submit, choices = self.submit, [self.choice(index) for index in indexes]
        if submit is None:
            return Prompt(0, [], max(1, len(choices)))
        hashes, first_ids = [], pack_ids(submit.params.first_token_ids)
        ids = submit.prompt_ids + first_ids
        if block_tokens and submit.params.prompt_logprobs is None:
            hashes = block_hashes(ids, block_tokens, submit.cache_salt.encode())
        params, num_tokens = submit.params, self.num_tokens(indexes)
        return Prompt(
            num_tokens,
            hashes,
            len(choices),
            goes_on=num_tokens > num_ids(ids) and not self.begins_anew,
            ends_at_once=params.pooling is not None or params.max_new_tokens == 1,
        )

    def beginning(self, num_tokens: int) -> LoadAhead:
        """Return what a replica is sent that shall load the pages of its first tokens."""
        assert self.submit is not None
        ids = self.submit.prompt_ids + pack_ids(self.submit.params.first_token_ids)
        return LoadAhead(pack_ids(unpack_ids(ids)[:num_tokens]), self.submit.cache_salt)

    def num_tokens(self, indexes: Iterable[int]) -> int:
        """Return the number of its tokens: given ones, and those that these choices have."""
        assert self.submit is not None
        num_given = len(self.submit.params.first_token_ids)
        choices = [self.choice(index) for index in indexes]
        num_generated = sum(max(0, len(choice.token_ids) - num_given) for choice in choices)
        return num_ids(self.submit.prompt_ids) + num_given + num_generated

    def has_all_logprobs(self, index: int, facts: MovableChoice) -> bool:
        """Return whether a replica has sent the log-probabilities of all tokens of a choice."""
        assert self.submit is not None
        params = self.submit.params
        num_sampled = len(self.choice(index).token_ids) - len(params.first_token_ids)
        return params.num_top_logprobs is None or len(facts.logprobs) == num_sampled

    @property
    def begins_anew(self) -> bool:
        """Whether it is computed from its first token on where its replica is lost.

        It asks for log-probabilities, of which only those are known that a replica sends which
        computes prompts for others.
        """
        assert self.submit is not None
        params = self.submit.params
        return params.num_top_logprobs is not None or params.prompt_logprobs is not None

    # --- what a replica is sent -------------------------------------------------------------------

    def next_submit(self, indexes: Iterable[int] = (0,)) -> Submit:
        """Return the request as the next replica of these choices gets it."""
        return self.moved(indexes) if self.is_moving else self.sent_again(indexes)

    def sent_again(self, indexes: Iterable[int]) -> Submit:
        """Return the request with these choices as their client has sent it."""
        submit = self.submit
        assert submit is not None
        message, indexes = submit, sorted(indexes)
        if len(indexes) < submit.params.n:
            message = message.of_choices(indexes)
        return msgspec.structs.replace(message, num_losses=self.num_losses)

    def moved(
        self, indexes: Iterable[int], facts: Mapping[int, MovableChoice] | None = None
    ) -> Submit:
        """Return the request with these choices as they go on at another scheduler.

        Args:
            indexes: of the choices.
            facts: of each of them what the replica has sent that has computed its prompt. Without,
                a request with logprobs is computed from its first token there.
        """
        submit = self.submit
        assert submit is not None
        known = [(index, self.choice(index)) for index in sorted(indexes)]
        if facts is not None:
            progress = [choice.progress(index, facts[index]) for index, choice in known]
        elif self.begins_anew:
            progress = [ChoiceProgress(index) for index, _ in known]
        else:
            progress = [choice.progress(index) for index, choice in known]
        was_admitted = any(choice.first_token_at for choice in self.choices.values())
        fields = {"frontend_retry": True, "client_retry": False}
        message = msgspec.structs.replace(submit, progress=progress, **fields)
        if was_admitted:
            message = msgspec.structs.replace(message, queue_deadline=None)
        return msgspec.structs.replace(message, num_losses=self.num_losses)


@dataclass(slots=True, frozen=True)
class Run:
    """A choice that the scheduler of a replica has said to run.

    Attributes:
        placement: as in Submit.
        was_handed_over: it went on at another replica, which is no fault.
    """

    name: Name
    index: int
    choice: PlacedChoice
    placement: int
    was_handed_over: bool = False

    def counts(self, number: int) -> bool:
        """Return whether what this replica generates for it counts."""
        choice = self.choice
        return (
            choice.replica == number
            and choice.since <= self.placement <= choice.placement
            and not choice.has_ended
        )  # fmt: skip


# Ended requests of each replica whose place is remembered.
MAX_ENDED = 4096


class EndedRequests:
    """The owners of ended choices, of which the oldest requests are forgotten.

    Args:
        num_replicas: largest number of replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self._max = MAX_ENDED * num_replicas
        self._owners: OrderedDict[Name, dict[int, ChoiceOwner]] = OrderedDict()

    def note(self, name: Name, index: int, owner: ChoiceOwner) -> None:
        """Remember where a choice has ended, unless a later placement of it has ended, too."""
        owners = self._owners.setdefault(name, {})
        self._owners.move_to_end(name)
        known = owners.get(index)
        if known is None or owner.placement >= known.placement:
            owners[index] = owner
        while len(self._owners) > self._max:
            self._owners.popitem(last=False)

    def owner_of(self, name: Name, index: int) -> ChoiceOwner | None:
        """Return the replica that can replay the end of a choice; None: not known."""
        return self._owners.get(name, {}).get(index)

    def forget(self, name: Name) -> None:
        """Forget a request: a new one of its name begins."""
        self._owners.pop(name, None)

    def forget_replica(self, replica: int) -> None:
        """Forget what has ended at a replica that is gone."""
        for name, owners in list(self._owners.items()):
            left = {index: owner for index, owner in owners.items() if owner.replica != replica}
            if left:
                self._owners[name] = left
            else:
                del self._owners[name]
