"""The requests of all clients from their Submit to their last end, and where each choice is.

`OpenRequests` is their one owner: intake asks it which are open, `Dispatch` (replicas.py) sends
what it returns. A request is kept as it was sent, because a scheduler that dies loses what it had
received and not yet journaled: whatever was on its way, and whatever waited in its socket.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

import msgspec

from quadriga.wire.logprobs import SampledLogprobs, block_of_token
from quadriga.wire.packing import unpack_ids
from quadriga.wire.to_detok import HeldChoice, StepNews, StoredPrompt
from quadriga.wire.to_scheduler import LoadAhead, Submit
from quadriga.wire.trace import note_replica
from tokenizer_proc.replicas.placed import (
    NEVER_PLACED,
    ChoiceOwner,
    EndedRequests,
    Name,
    PlacedChoice,
    PlacedRequest,
    RouterKey,
    Run,
)
from tokenizer_proc.replicas.replica_set import ReplicaSet, ReplicaState
from tokenizer_proc.replicas.router import Router

# Lost clients and their requests are remembered up to these bounds.
MAX_LOST_CLIENTS = 1024
MAX_LOST_REQUESTS = 65536

RequestT = TypeVar("RequestT")


class ClientRequests(Generic[RequestT]):
    """Requests by client and request id."""

    def __init__(self) -> None:
        self._by_client: dict[bytes, dict[str, RequestT]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def __bool__(self) -> bool:
        return bool(self._by_client)

    def __iter__(self) -> Iterator[RequestT]:
        return chain.from_iterable(requests.values() for requests in self._by_client.values())

    def of_client(self, client: bytes) -> dict[str, RequestT]:
        """Return the requests of a client by id; only to be read."""
        return self._by_client.get(client, {})

    def find(self, client: bytes, request_id: str) -> RequestT | None:
        """Return a request, or None."""
        return self.of_client(client).get(request_id)

    def put(self, client: bytes, request_id: str, request: RequestT) -> None:
        """Add a request, in place of the one of the same id if there is one."""
        self._by_client.setdefault(client, {})[request_id] = request

    def remove(self, client: bytes, request_id: str) -> None:
        """Remove a request, which must be present."""
        requests = self._by_client[client]
        del requests[request_id]
        if not requests:
            del self._by_client[client]

    def remove_client(self, client: bytes) -> dict[str, RequestT]:
        """Remove and return all requests of a client, by id."""
        return self._by_client.pop(client, {})


class LostClients:
    """Ids of the requests of clients that were lost, which may come back past all limits."""

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, set[str]] = OrderedDict()
        self._num_ids = 0

    def __contains__(self, name: Name) -> bool:
        return name[1] in self._ids.get(name[0], ())

    def remember(self, client: bytes, request_ids: set[str]) -> None:
        """Remember the requests of a client in place of those that it lost before."""
        if not request_ids:
            return
        self._forget(client)
        self._ids[client] = request_ids
        self._num_ids += len(request_ids)
        while len(self._ids) > MAX_LOST_CLIENTS or self._num_ids > MAX_LOST_REQUESTS:
            self._forget(next(iter(self._ids)))

    def _forget(self, client: bytes) -> None:
        self._num_ids -= len(self._ids.pop(client, ()))


class EndKind(enum.Enum):
    """What an end of a choice is.

    Attributes:
        COUNTED: the end of the choice.
        REPEATED: one that its client may have, or ignores: it is passed on, and ends nothing here.
        DROPPED: of a replica that does not own the choice.
    """

    COUNTED = enum.auto()
    REPEATED = enum.auto()
    DROPPED = enum.auto()


class CountedEnd(NamedTuple):
    """What an end of a choice is, and its request where that is not over for its client."""

    kind: EndKind
    request: PlacedRequest | None = None


class HandOver(NamedTuple):
    """Choices of a request that go on at another replica while theirs still has them.

    Attributes:
        replica: their new owner.
        submit: what it is sent.
        seqs: numbers of the choices that their replica drops.
    """

    replica: int
    submit: Submit
    seqs: list[int]


class OpenRequests:
    """Requests from their Submit to the end of their last choice, and where the last ones ended.

    Sends nothing: `Dispatch` does.

    Args:
        replicas: those that have joined.
        router: is kept informed of what the replicas have.
        block_tokens: tokens of a block of the router's index.
        sender: number of this frontend, as in FrontendRestarted.

    Attributes:
        on_change: called when the number of open requests has changed.
        num_results_dropped: chunks of replicas that did not own their choice.
    """

    def __init__(
        self, replicas: ReplicaSet, router: Router[RouterKey], block_tokens: int, sender: int
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._block_tokens = block_tokens
        self._sender = sender
        self._last_placement = sender
        self._open = ClientRequests[PlacedRequest]()
        self._ended = EndedRequests(replicas.size)
        self._lost = LostClients()
        self.on_change: Callable[[], None] = lambda: None
        self.num_results_dropped = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended for their clients."""
        return sum(placed.is_open for placed in self._open)

    def find(self, client: bytes, request_id: str) -> PlacedRequest | None:
        """Return a request that has not ended at its replicas, or None."""
        return self._open.find(client, request_id)

    def of_client(self, client: bytes) -> Mapping[str, PlacedRequest]:
        """Return the requests of a client that have not ended at their replicas, by id."""
        return self._open.of_client(client)

    def open_of_client(self, client: bytes) -> list[PlacedRequest]:
        """Return the open requests of a client."""
        return [placed for placed in self._open.of_client(client).values() if placed.is_open]

    def is_open(self, client: bytes, request_id: str) -> bool:
        """Return whether a request is open."""
        placed = self.find(client, request_id)
        return placed is not None and placed.is_open

    def was_accepted(self, client: bytes, request_id: str) -> bool:
        """Return whether a request is open, or was when its client's connection was lost."""
        return (client, request_id) in self._lost or self.is_open(client, request_id)

    def lose(self, client: bytes, requests: Iterable[PlacedRequest]) -> None:
        """Take in that requests are over for a client, whose connection is lost."""
        for placed in requests:
            placed.is_lost = True
        self._lost.remember(client, {placed.name[1] for placed in requests})

    @property
    def adapter_ids(self) -> set[str]:
        """Ids of the adapters that requests have which have not ended at their replicas."""
        submits = (placed.submit for placed in self._open)
        return {submit.adapter.id for submit in submits if submit is not None and submit.adapter}

    def of_replica(self, number: int) -> list[PlacedRequest]:
        """Return the requests with choices at a replica that can go on at another one."""
        return [p for p in self._open if p.submit is not None and p.is_at(number)]

    def _add(self, name: Name) -> PlacedRequest:
        placed = PlacedRequest(name)
        self._open.put(*name, placed)
        self.on_change()
        return placed

    def _remove(self, placed: PlacedRequest) -> None:
        self._open.remove(*placed.name)
        self.on_change()

    def is_of_this_frontend(self, placement: int) -> bool:
        """Return whether this frontend has given a placement, and so knows the request."""
        return placement > self._sender

    # --- what clients send ------------------------------------------------------------------------

    def submit(
        self, submit: Submit, aborted_by: str = "", keep_s: float | None = None
    ) -> PlacedRequest:
        """Note a request of a client, new or sent again, and return it.

        Of one that is sent again, all choices end once more. Those that have ended are asked for
        at the replicas that have their ends.

        Args:
            submit: the request.
            aborted_by: as in AbortRequest; "" if it was not aborted.
            keep_s: as in Generate.
        """
        name = submit.client, submit.request_id
        placed = self.find(*name)
        if placed is None:
            placed = self._add(name)
            if not submit.client_retry:
                self._ended.forget(name)
        placed.submit, placed.waits = submit, submit.client_retry
        placed.aborted_by, placed.keep_s, placed.is_lost = aborted_by, keep_s, False
        for index in range(submit.params.n):
            if index not in placed.choices and submit.client_retry:
                owner = self._ended.owner_of(name, index)
                if owner is not None:
                    placed.choices[index] = PlacedChoice(*owner)
            placed.choice(index).has_ended = False
        return placed

    def place(self, placed: PlacedRequest) -> tuple[int, Submit]:
        """Give the choices of a request that are at no replica to the router's choice.

        At least one replica must take requests.

        Returns:
            The number of the replica, and what to send there.
        """
        indexes, placement = placed.homeless, self._next_placement()
        message, prompt = placed.next_submit(indexes), placed.prompt(self._block_tokens, indexes)
        number = self._router.place(RouterKey(*placed.name, placement), prompt).replica
        owner = ChoiceOwner(number, placement, placement)
        for index in indexes:
            placed.choices[index].give_to(owner)
        return number, self._stamped(message, owner)

    def sent_again(self, placed: PlacedRequest, owner: ChoiceOwner, indexes: list[int]) -> Submit:
        """Return what the owner of some choices is sent, where their client has sent them again."""
        key = RouterKey(*placed.name, owner.since)
        if key not in self._router.ledger:
            self._router.count(key, owner.replica, placed.prompt(self._block_tokens, indexes))
        owner = owner._replace(placement=self._next_placement())
        for index in indexes:
            placed.choices[index].give_to(owner)
        return self._stamped(placed.sent_again(indexes), owner)

    def resent(self, placed: PlacedRequest, owner: ChoiceOwner, indexes: list[int]) -> Submit:
        """Return what the new scheduler of an owner is sent, which may know the choices."""
        message = self._stamped(placed.moved(indexes), owner)
        assert placed.submit is not None
        return msgspec.structs.replace(message, client_retry=placed.submit.client_retry)

    def _next_placement(self) -> int:
        self._last_placement += 1
        return self._last_placement

    def _stamped(self, message: Submit, owner: ChoiceOwner) -> Submit:
        return msgspec.structs.replace(
            message,
            placement=owner.placement,
            since=owner.since,
            sender=self._sender,
            moves_on=self._router.hands_over(owner.replica),
        )

    # --- what replicas report ---------------------------------------------------------------------

    def on_news(self, number: int, step: StepNews) -> list[tuple[int, int]]:
        """Note what a replica has, and the tokens of a step.

        Returns:
            The choices that a replica has and does not own: its number, and its scheduler's number.
        """
        replica, news = self._replicas[number], step.news
        strays: list[tuple[int, int]] = []
        self._router.on_news(number, news)
        if news.restates:
            replica.runs.clear()
            replica.strays.clear()
            replica.movable.clear()
            for ended in news.ended:
                for index, placement in ended.placements.items():
                    name = (ended.client, ended.request_id)
                    strays += self._note_end(name, index, ChoiceOwner(number, placement, placement))
        for held in (*news.held, *step.started):
            strays += self._hold(number, held)
        runs = replica.runs
        for seq, token in zip(step.seqs, unpack_ids(step.token_ids), strict=True):
            if (run := runs.get(seq)) is not None and run.counts(number):
                run.choice.token_ids.append(token)
        if step.logprobs is not None:
            self._note_logprobs(replica, step.seqs, step.logprobs)
        replica.movable.update((choice.seq, choice) for choice in news.movable)
        return strays

    def _note_logprobs(
        self, replica: ReplicaState, seqs: list[int], sampled: SampledLogprobs
    ) -> None:
        """Note the logprobs of a step's tokens, of the choices that may go on elsewhere."""
        for index, place in enumerate(unpack_ids(sampled.rows)):
            facts = replica.movable.get(seqs[place]) if place >= 0 else None
            if facts is not None and facts.logprobs:
                width = facts.logprobs[0].width
                facts.logprobs.append(block_of_token(sampled.block, index, width))

    def _note_end(self, name: Name, index: int, owner: ChoiceOwner) -> list[tuple[int, int]]:
        """Note that a replica can replay the end of a choice. Return what is superseded by that."""
        self._ended.note(name, index, owner)
        placed = self.find(*name)
        choice = placed.choices.get(index) if placed is not None else None
        if placed is None or choice is None or choice.placement >= owner.placement:
            return []
        strays = self._disown(placed, index, choice)
        choice.give_to(owner)
        choice.has_ended = placed.submit is None
        if placed.has_ended:
            self._remove(placed)
        return strays

    def _hold(self, number: int, held: HeldChoice) -> list[tuple[int, int]]:
        """Note that a replica has a choice of a request, and its tokens.

        Returns:
            As in on_news.
        """
        name, replica = (held.client, held.request_id), self._replicas[number]
        placed, strays = self.find(*name), []
        choice = None if placed is None else placed.choices.get(held.index)
        if choice is None:
            ended = self._ended.owner_of(name, held.index)
            is_over = self.is_of_this_frontend(held.placement) or (
                ended is not None and ended.placement > held.placement
            )
            if is_over:
                choice = PlacedChoice()
            else:  # its client comes back to this frontend, which replaces another one
                placed = placed or self._add(name)
                choice = placed.choice(held.index)
        run = replica.runs[held.seq] = Run(name, held.index, choice, held.placement)
        if placed is not None and held.placement > choice.placement:
            strays = self._disown(placed, held.index, choice)
            choice.give_to(ChoiceOwner(number, held.placement, held.placement))
        if not run.counts(number):
            replica.strays[held.seq] = run
            return [*strays, (number, held.seq)]
        for seq in [s for s, stray in replica.strays.items() if stray.choice is choice]:
            del replica.strays[seq]  # all of it came before
        if choice.seq != held.seq:
            replica.runs.pop(choice.seq, None)
        choice.seq = held.seq
        choice.token_ids = unpack_ids(held.token_ids)
        choice.first_token_at = choice.first_token_at or held.first_token_at
        key = RouterKey(*name, choice.since)
        if key not in self._router.ledger and placed is not None:
            self._router.count(key, number, placed.prompt(self._block_tokens, [held.index]))
        if held.first_token_at:
            self._router.on_start(key, held.index)
        return strays

    def _disown(
        self, placed: PlacedRequest, index: int, choice: PlacedChoice
    ) -> list[tuple[int, int]]:
        """Take a choice from its owner, as another replica has it. Return what runs there."""
        if choice.replica is None or choice.placement == NEVER_PLACED:
            return []
        replica, seq = self._replicas[choice.replica], choice.seq
        self._router.on_end(RouterKey(*placed.name, choice.since), index)
        run = replica.runs.get(seq)
        choice.seq = -1
        if run is None:
            return []
        replica.strays[seq] = run
        return [(choice.replica, seq)]

    def on_withdrawn(self, number: int, seqs: list[int]) -> None:
        """Note that nothing more comes of choices that a replica did not own."""
        for seq in seqs:
            self._replicas[number].runs.pop(seq, None)
            self._replicas[number].strays.pop(seq, None)

    def on_end(self, number: int, name: Name, index: int, placement: int) -> CountedEnd:
        """Note the end of a choice at a replica. Return what it is for the client.

        Args:
            number: the replica.
            name: the request.
            index: the choice.
            placement: as in Submit.
        """
        placed = self.find(*name)
        choice = None if placed is None else placed.choices.get(index)
        if placed is None or choice is None:
            known = self._ended.owner_of(name, index)
            is_known = known is not None and known[:2] == (number, placement)
            is_earlier = known is None and not self.is_of_this_frontend(placement)
            return CountedEnd(EndKind.REPEATED if is_known or is_earlier else EndKind.DROPPED)
        if choice.replica != number or not choice.since <= placement <= choice.placement:
            return CountedEnd(EndKind.DROPPED)
        if choice.has_ended or placement < choice.placement:
            return CountedEnd(EndKind.REPEATED)
        if placed.waits:
            choice.ends_at_owner = True
            return CountedEnd(EndKind.REPEATED)
        is_open = placed.is_open
        self._replicas[number].runs.pop(choice.seq, None)
        self._replicas[number].movable.pop(choice.seq, None)
        choice.end()
        self._router.on_end(RouterKey(*name, choice.since), index)
        self._ended.note(name, index, ChoiceOwner(number, placement, choice.since))
        if placed.has_ended:
            for since in {c.since for c in placed.choices.values()}:
                self._router.forget(RouterKey(*name, since))
            self._remove(placed)
        return CountedEnd(EndKind.COUNTED, placed if is_open else None)

    # --- what goes on at a replica of another role ------------------------------------------------

    @property
    def movable(self) -> Iterator[tuple[int, PlacedRequest, list[int]]]:
        """Yield the requests whose prompts a replica has computed for others.

        With each come the replica, and the indexes of the choices that can go on. A request that
        its client has to send to this frontend first, or has just sent again, waits.
        """
        for number, replica in self._replicas.live():
            if not self._router.hands_over(number):
                continue
            found: dict[Name, list[int]] = {}
            for seq in list(replica.movable):
                run = replica.runs.get(seq)
                if run is None or not run.counts(number):
                    del replica.movable[seq]
                else:
                    found.setdefault(run.name, []).append(run.index)
            for name, indexes in found.items():
                placed = self.find(*name)
                if placed is not None and placed.submit is not None and not placed.waits:
                    yield number, placed, indexes

    def hand_over(self, placed: PlacedRequest, indexes: list[int], number: int) -> HandOver | None:
        """Give choices to the replica at which they go on, with their tokens, if there is one.

        Args:
            placed: the request.
            indexes: choices that a replica has.
            number: that replica.

        Returns:
            What to send; None: they stay.
        """
        if not self._router.has_next(placed.num_tokens(indexes), number):
            return None  # it may be asked often: no hash was computed
        replica = self._replicas[number]
        found = {index: replica.movable[placed.choices[index].seq] for index in indexes}
        if not all(placed.has_all_logprobs(index, facts) for index, facts in found.items()):
            return None
        prompt = placed.prompt(self._block_tokens, indexes)
        routed = self._router.find_next(prompt, number)
        if routed is None:
            return None
        seqs = list[int]()
        for index, facts in found.items():
            choice = placed.choices[index]
            seq = choice.seq
            del replica.movable[seq]
            note_replica(facts.spans, number)
            choice.admitted_at, choice.cached_tokens = facts.admitted_at, facts.cached_tokens
            self._router.on_end(RouterKey(*placed.name, choice.since), index)
            replica.strays[seq] = replace(replica.runs[seq], was_handed_over=True)
            choice.leave_replica()
            seqs.append(seq)
        placed.is_moving = True
        placement = self._next_placement()
        owner = ChoiceOwner(routed.replica, placement, placement)
        message = self._stamped(placed.moved(indexes, found), owner)
        self._router.count(
            RouterKey(*placed.name, placement), owner.replica, prompt, routed.num_cached
        )
        for index in indexes:
            placed.choices[index].give_to(owner)
        return HandOver(routed.replica, message, seqs)

    def load_ahead(self, number: int, stored: StoredPrompt) -> tuple[int, LoadAhead] | None:
        """Choose where the first pages of a prompt are loaded, before its last ones are computed.

        Args:
            number: the replica that computes the prompt.
            stored: what can be loaded.

        Returns:
            The number of a replica, and what it is sent; None: nothing is loaded yet.
        """
        placed = self.find(stored.client, stored.request_id)
        choice = None if placed is None else placed.choices.get(stored.index)
        if placed is None or choice is None or placed.submit is None or placed.aborted_by:
            return None
        if choice.replica != number or choice.has_ended:
            return None
        prompt = placed.prompt(self._block_tokens)
        placed.ahead = self._router.choose_ahead(prompt, number, placed.ahead)
        return None if placed.ahead is None else (placed.ahead, placed.beginning(stored.num_tokens))

    # --- what leaves a replica --------------------------------------------------------------------

    def take_back(self, placed: PlacedRequest, number: int) -> None:
        """Note that the open choices of a request are not at a replica any more."""
        for choice in placed.choices.values():
            is_there = choice.replica == number
            if is_there and not choice.has_ended and not choice.ends_at_owner:
                self._replicas[number].runs.pop(choice.seq, None)
                self._router.forget(RouterKey(*placed.name, choice.since))
                choice.leave_replica()
        placed.is_moving = True

    def forget_unsent(self, number: int) -> None:
        """Forget the requests of a replica that their clients have not sent to this frontend.

        Their clients send them again.
        """
        for placed in [p for p in self._open if p.submit is None and p.is_at(number)]:
            self.take_back(placed, number)
            placed.choices = {i: c for i, c in placed.choices.items() if c.replica is not None}
            if placed.has_ended:
                self._remove(placed)

    def forget_ended(self, number: int) -> None:
        """Forget what has ended at a replica that is gone."""
        self._ended.forget_replica(number)
        for placed in self._open:
            for choice in placed.choices.values():
                if choice.replica == number:
                    choice.ends_at_owner = False
                    if choice.has_ended:
                        choice.replica = None
