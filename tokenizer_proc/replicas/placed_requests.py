"""The open requests of all clients: at which replica each is, and the tokens that it has there."""

from collections.abc import Callable, Mapping

from quadriga.wire.messages.arrays import unpack_ids
from quadriga.wire.messages.replica_news import HeldChoice
from quadriga.wire.messages.to_detok import StepNews
from quadriga.wire.messages.to_scheduler import Submit
from tokenizer_proc.open_requests import ClientRequests
from tokenizer_proc.replicas.ended_requests import EndedRequests
from tokenizer_proc.replicas.placed import Name, PlacedRequest
from tokenizer_proc.replicas.replica_set import ReplicaSet
from tokenizer_proc.replicas.router import Router


class PlacedRequests:
    """Requests from their Submit to the end of their last choice, and where the last ones ended.

    Sends nothing: `Dispatch` does.

    Args:
        replicas: those that have joined.
        router: is kept informed of what the replicas have.
        block_tokens: tokens of a block of the router's index.

    Attributes:
        on_change: called when the number of open requests has changed.
    """

    def __init__(self, replicas: ReplicaSet, router: Router[Name], block_tokens: int) -> None:
        self._replicas = replicas
        self._router = router
        self._block_tokens = block_tokens
        self._open = ClientRequests[PlacedRequest]()
        self._ended = EndedRequests(replicas.size)
        self.on_change: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._open)

    def find(self, client: bytes, request_id: str) -> PlacedRequest | None:
        """Return an open request, or None."""
        return self._open.find(client, request_id)

    def of_client(self, client: bytes) -> Mapping[str, PlacedRequest]:
        """Return the open requests of a client by id."""
        return self._open.of_client(client)

    def of_replica(self, number: int) -> list[PlacedRequest]:
        """Return the requests of a replica that can go on at another one."""
        return [p for p in self._open if p.replica == number and p.submit is not None]

    def _add(self, name: Name) -> PlacedRequest:
        placed = PlacedRequest(name)
        self._open.put(*name, placed)
        self.on_change()
        return placed

    def _remove(self, placed: PlacedRequest) -> None:
        self._open.remove(*placed.name)
        self.on_change()

    # --- what clients send ------------------------------------------------------------------------

    def submit(self, submit: Submit) -> PlacedRequest:
        """Note a request of a client, new or sent again, and return it."""
        name = submit.client, submit.request_id
        placed = self.find(*name) or self._add(name)
        placed.submit, placed.aborted_by = submit, ""
        placed.ended.clear()  # all choices of a retry end once more
        return placed

    def place(self, placed: PlacedRequest) -> int:
        """Give a request to a replica: where it has ended before, or to the router's choice.

        At least one replica must take requests.

        Returns:
            The number of the replica.
        """
        submit, prompt = placed.next_submit(), placed.prompt(self._block_tokens)
        earlier = self._ended.replica_of(placed.name)
        if submit.client_retry and earlier is not None:
            self._router.count(placed.name, earlier, prompt)
            placed.replica = earlier
        else:
            placed.replica = self._router.place(placed.name, prompt).replica
        return placed.replica

    # --- what replicas report ---------------------------------------------------------------------

    def on_news(self, number: int, step: StepNews) -> None:
        """Note what a replica has, and the tokens of a step."""
        replica, news = self._replicas[number], step.news
        self._router.on_news(number, news)
        if news.restates:
            replica.choices.clear()
            for ended in news.ended:
                self._ended.note((ended.client, ended.request_id), number)
        for held in (*news.held, *step.started):
            self._hold(number, held)
        for seq, token in zip(step.seqs, unpack_ids(step.token_ids), strict=True):
            if (choice := replica.choices.get(seq)) is not None:
                choice.token_ids.append(token)

    def _hold(self, number: int, held: HeldChoice) -> None:
        """Note that a replica has a choice of a request, and its tokens."""
        # One that is not known: its client comes back to this frontend, which replaces another one.
        name, choices = (held.client, held.request_id), self._replicas[number].choices
        placed = self.find(*name) or self._add(name)
        if placed.replica is None:
            placed.replica = number
            self._router.count(name, number, placed.prompt(self._block_tokens))
        if placed.replica != number or held.index in placed.ended:
            return
        choice = placed.choice(held.index)
        choices.pop(choice.seq, None)
        choice.seq = held.seq
        choice.token_ids = unpack_ids(held.token_ids)
        choice.first_token_at = choice.first_token_at or held.first_token_at
        choices[held.seq] = choice
        if held.first_token_at:
            self._router.on_start(name, held.index)

    def on_end(self, number: int, name: Name, index: int, is_lost: bool) -> None:
        """Note the end of a choice at a replica. is_lost: because its client's connection was."""
        placed = self.find(*name)
        if placed is None or placed.replica != number:
            return
        if is_lost and not placed.aborted_by and placed.submit is not None:
            return  # the client is back and has sent the request again
        placed.ended.add(index)
        self._router.on_end(name, index)
        choice = placed.choices.pop(index, None)
        if choice is not None:
            self._replicas[number].choices.pop(choice.seq, None)
        if placed.has_ended:
            self._router.forget(name)
            self._remove(placed)
            self._ended.note(name, number)

    # --- what leaves a replica --------------------------------------------------------------------

    def take_back(self, placed: PlacedRequest) -> None:
        """Note that a request is at no replica any more, and goes on at another one."""
        placed.leave_replica()
        self._router.forget(placed.name)

    def forget_unsent(self, number: int) -> None:
        """Forget the requests of a replica that their clients have not sent to this frontend.

        Their clients send them again.
        """
        for placed in [p for p in self._open if p.replica == number and p.submit is None]:
            self._remove(placed)

    def forget_ended(self, number: int) -> None:
        """Forget what has ended at a replica that is gone."""
        self._ended.forget_replica(number)
