"""The frontend's sockets to the other processes, of one replica or of several."""

from functools import partial

from quadriga.prefix_blocks import pages_per_block
from quadriga.runtime.child import Child, Command
from quadriga.wire.messages.to_detok import Delivered
from quadriga.wire.sockets import AsyncPort, Outbox, bind_frames
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.open_requests import SchedulerLink
from tokenizer_proc.replicas.placed import Name
from tokenizer_proc.replicas.replicas import Replicas
from tokenizer_proc.replicas.router import Router


class Ring:
    """The links to schedulers and from detokenizers.

    Attributes:
        scheduler: the way to the scheduler, or to those of all replicas.
    """

    def __init__(self, child: Child) -> None:
        count = child.config.replicas.dp
        ends = [child.endpoints]
        if count > 1:
            ends = [child.endpoints.of_replica(number) for number in range(count)]
        self._sockets = [bind_frames(end.delivery) for end in ends]
        self._ports: list[AsyncPort] = []
        self._frontend: Frontend | None = None
        outboxes = [Outbox(end.scheduler) for end in ends]
        self._replicas = self._make_replicas(child, outboxes) if count > 1 else None
        self.scheduler: SchedulerLink = self._replicas or outboxes[0]

    def _make_replicas(self, child: Child, outboxes: list[Outbox]) -> Replicas:
        page_size, limits = child.config.worker.page_size, child.config.scheduler
        block_tokens = page_size * pages_per_block(page_size)
        method = child.config.replicas.load_balance_method
        router = Router[Name](
            method, len(outboxes), block_tokens, page_size, limits.max_queued_requests
        )

        def on_recalled(number: int) -> None:
            child.control.report("recalled", replica=number)

        return Replicas(outboxes, router, block_tokens, self._deliver, on_recalled, self._show)

    def _deliver(self, client: bytes, payload: bytes, delivered: Delivered) -> None:
        assert self._frontend is not None
        self._frontend.deliver(client, payload, delivered)

    def _show(self, replica: int, frame: bytes) -> None:
        assert self._frontend is not None
        self._frontend.show(frame, replica)

    def open(self, frontend: Frontend) -> None:
        """Give results to the frontend from now on."""
        self._frontend = frontend
        replicas = self._replicas
        if replicas is None:
            self._ports = [AsyncPort(self._sockets[0], frontend.on_delivery)]
        else:
            self._ports = [
                AsyncPort(socket, partial(replicas.on_delivery, number))
                for number, socket in enumerate(self._sockets)
            ]

    def on_process(self, command: Command, argument: str, frontend: Frontend) -> None:
        """Take in a RESTARTED, DIED, LOST or RECALL of the launcher."""
        name, _, number = argument.partition("/")
        replicas = self._replicas
        if replicas is None:
            if command is Command.RESTARTED and name == "scheduler_proc":
                frontend.intake.on_scheduler_restarted()
        elif command is Command.LOST:
            replicas.on_lost(int(argument))
        elif command is Command.RECALL:
            replicas.recall(int(argument))
        elif number and command is Command.DIED:
            replicas.on_died(int(number), name)
        elif number:
            replicas.on_restarted(int(number), name)

    def close(self) -> None:
        """Close the sockets of results."""
        for port in self._ports:
            port.close()
