"""Where requests are sent: each to one replica at a time, or it waits while there is none."""

from quadriga.wire.messages.to_scheduler import AbortRequest, Drain, Submit
from tokenizer_proc.replicas.placed import Name, PlacedRequest
from tokenizer_proc.replicas.placed_requests import PlacedRequests
from tokenizer_proc.replicas.replica_set import ReplicaSet
from tokenizer_proc.replicas.router import Router


class Dispatch:
    """Sends requests to schedulers: new ones, those that have waited, and those that move.

    Args:
        replicas: those that have joined.
        router: chooses the replicas.
        requests: the open requests.

    Attributes:
        num_moved: number of requests that went on at another replica.
    """

    def __init__(
        self, replicas: ReplicaSet, router: Router[Name], requests: PlacedRequests
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._waiting: dict[Name, PlacedRequest] = {}
        self._is_draining = False
        self.num_moved = 0

    def submit(self, submit: Submit) -> None:
        """Send a request of a client, new or sent again.

        One that some replica may have waits until all have said what they hold.
        """
        placed = self._requests.submit(submit)
        if placed.replica is not None:
            self._replicas[placed.replica].outbox.send(submit)
        elif submit.client_retry and not self._replicas.all_known:
            self._waiting[placed.name] = placed
        else:
            self._place(placed)

    def _place(self, placed: PlacedRequest) -> None:
        """Send a request to a replica. It waits while there is none."""
        if not self._router.has_replica:
            self._waiting[placed.name] = placed
            return
        number = self._requests.place(placed)
        self._send(placed, placed.next_submit(), number)

    def _send(self, placed: PlacedRequest, submit: Submit, number: int) -> None:
        """Send a request to a replica, and that it was aborted where its client has done so."""
        outbox = self._replicas[number].outbox
        outbox.send(submit)
        if placed.aborted_by:
            outbox.send(AbortRequest(*placed.name, placed.aborted_by))

    def place_waiting(self) -> None:
        """Send the requests that have waited, once every replica has said what it holds."""
        if not (self._replicas.all_known and self._router.has_replica):
            return
        waiting, self._waiting = self._waiting, {}
        for placed in waiting.values():
            if placed.replica is None:
                self._place(placed)
            else:
                assert placed.submit is not None
                self._send(placed, placed.submit, placed.replica)
        if waiting:
            self.send_drain()

    def abort(self, message: AbortRequest) -> None:
        """Abort a request of a client, or all of them, where they are."""
        for request_id, placed in self._requests.of_client(message.client).items():
            if message.request_id in ("", request_id):
                placed.aborted_by = message.by
        placed_one = self._requests.find(message.client, message.request_id)
        if placed_one is not None and placed_one.replica is not None:
            self._replicas[placed_one.replica].outbox.send(message)
        else:
            self._replicas.broadcast(message)

    def resend(self, number: int) -> None:
        """Send the requests of a replica to its new scheduler, which knows those it journaled."""
        for placed in self._requests.of_replica(number):
            self._send(placed, placed.moved(), number)

    def move_all(self, number: int) -> int:
        """Move the requests of a replica that has them no more. Return their number."""
        moved = self._requests.of_replica(number)
        for placed in moved:
            self.num_moved += 1
            self._requests.take_back(placed)
            self._place(placed)
        self._requests.forget_unsent(number)
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
