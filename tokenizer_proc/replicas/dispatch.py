"""Where requests are sent: each choice to one replica at a time; it waits while there is none."""

from collections.abc import Iterable

from quadriga.wire.messages.to_scheduler import AbortRequest, Drain, Submit, Withdraw
from tokenizer_proc.replicas.placed import ChoiceOwner, Name, PlacedRequest, RouterKey
from tokenizer_proc.replicas.placed_requests import PlacedRequests
from tokenizer_proc.replicas.replica_set import ReplicaSet
from tokenizer_proc.replicas.router import Router


class Dispatch:
    """Sends requests to schedulers: new ones, those that have waited, and those that move.

    Args:
        replicas: those that have joined.
        router: chooses the replicas.
        requests: the open requests.
        sender: number of this frontend, as in FrontendRestarted.

    Attributes:
        num_moved: number of requests that went on at another replica.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        router: Router[RouterKey],
        requests: PlacedRequests,
        sender: int,
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._sender = sender
        self._waiting: dict[Name, PlacedRequest] = {}
        self._is_draining = False
        self.num_moved = 0

    def submit(self, submit: Submit) -> None:
        """Send a request of a client, new or sent again: each choice to its owner.

        One that some replica may have waits until all have said what they hold. So does one that a
        replica may be about to give back.
        """
        self._dispatch(self._requests.submit(submit))

    def _dispatch(self, placed: PlacedRequest) -> None:
        """Send the choices of a request to their owners, and the others to a replica."""
        owners = placed.open_by_owner()
        if self._must_wait(placed, owners):
            self._waiting[placed.name] = placed
            return
        placed.waits = False
        for owner, indexes in owners.items():
            message = self._requests.sent_again(placed, owner, indexes)
            self._send(placed, message, owner.replica)
        if placed.homeless:
            self._place(placed)

    def _must_wait(self, placed: PlacedRequest, owners: Iterable[ChoiceOwner]) -> bool:
        assert placed.submit is not None
        is_sure = not placed.homeless and all(
            self._requests.is_of_this_frontend(owner.placement) for owner in owners
        )
        if placed.submit.client_retry and not is_sure and not self._replicas.all_known:
            return True
        return any(self._replicas[owner.replica].recall for owner in owners)

    def _place(self, placed: PlacedRequest) -> None:
        """Send the choices that are at no replica to one. They wait while there is none."""
        if not self._router.has_replica:
            self._waiting[placed.name] = placed
            return
        number, message = self._requests.place(placed)
        self._send(placed, message, number)

    def _send(self, placed: PlacedRequest, submit: Submit, number: int) -> None:
        """Send a request to a replica, and that it was aborted where its client has done so."""
        outbox = self._replicas[number].outbox
        outbox.send(submit)
        if placed.aborted_by:
            outbox.send(AbortRequest(*placed.name, placed.aborted_by, self._sender))

    def place_waiting(self) -> None:
        """Send the requests that have waited, once every replica has said what it holds."""
        if not (self._replicas.all_known and self._router.has_replica):
            return
        waiting, self._waiting = self._waiting, {}
        for placed in waiting.values():
            self._dispatch(placed)
        if waiting:
            self.send_drain()

    def abort(self, message: AbortRequest) -> None:
        """Abort a request of a client, or all of them, where they are."""
        message = AbortRequest(message.client, message.request_id, message.by, self._sender)
        for request_id, placed in self._requests.of_client(message.client).items():
            if message.request_id in ("", request_id):
                placed.aborted_by = message.by
        placed_one = self._requests.find(message.client, message.request_id)
        owners = {} if placed_one is None else placed_one.open_by_owner()
        if not owners:
            self._replicas.broadcast(message)
        for number in {owner.replica for owner in owners}:
            self._replicas[number].outbox.send(message)

    def withdraw(self, strays: Iterable[tuple[int, int]]) -> None:
        """Make replicas drop choices that they do not own: their numbers, and their schedulers'."""
        for number, seq in strays:
            self._replicas[number].outbox.send(Withdraw([seq]))

    def resend(self, number: int) -> None:
        """Send the requests of a replica to its new scheduler, which knows those it journaled."""
        for placed in self._requests.of_replica(number):
            for owner, indexes in placed.open_by_owner().items():
                if owner.replica == number:
                    self._send(placed, self._requests.resent(placed, owner, indexes), number)

    def move_all(self, number: int) -> int:
        """Move the requests of a replica that has them no more. Return their number."""
        moved = self._requests.of_replica(number)
        for placed in moved:
            self.num_moved += 1
            self._requests.take_back(placed, number)
            if placed.name not in self._waiting:
                self._place(placed)
        self._requests.forget_unsent(number)
        self.place_waiting()
        self.send_drain()
        return len(moved)

    # --- drain ------------------------------------------------------------------------------------

    def begin_drain(self) -> None:
        """Let every replica finish what it has: the server stops."""
        self._is_draining = True
        self.send_drain()

    def send_drain(self) -> None:
        """Make every replica report when it has nothing left; it may have got more meanwhile."""
        if self._is_draining and not self._waiting:
            for _, replica in self._replicas.live():
                replica.has_drained = False
                replica.outbox.send(Drain())

    @property
    def has_drained(self) -> bool:
        """Whether the server stops, and neither a replica nor this class has a request left."""
        return self._is_draining and self._replicas.have_drained and not self._waiting
