"""The frontend's sockets to the other processes, of one replica or of several."""

from functools import partial

from quadriga.prefix_blocks import pages_per_block
from quadriga.runtime.child import Child
from quadriga.runtime.control_channel import Command
from quadriga.wire.async_port import AsyncPort
from quadriga.wire.messages.to_detok import Delivered
from quadriga.wire.node_links import NodeLinks
from quadriga.wire.sockets import Outbox, bind_frames
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.open_requests import SchedulerLink
from tokenizer_proc.replicas.load_report import LoadReport
from tokenizer_proc.replicas.node_link import NodeLink
from tokenizer_proc.replicas.placed import Name, RouterKey
from tokenizer_proc.replicas.replicas import Replicas
from tokenizer_proc.replicas.router import Router


class Ring:
    """The links to schedulers and from detokenizers.

    Replicas of a cluster join when the launcher says where they are.

    Attributes:
        scheduler: the way to the scheduler, or to those of all replicas.
    """

    def __init__(self, child: Child) -> None:
        replicas = child.config.replicas
        ends = [child.endpoints]
        if replicas.has_router:
            count = 0 if replicas.in_cluster else replicas.dp
            ends = [child.endpoints.of_replica(number) for number in range(count)]
        self._key_dir = child.config.frontend.curve_dir
        self._sockets = [bind_frames(end.delivery) for end in ends]
        self._ports: list[AsyncPort] = []
        self._node_links: dict[int, NodeLink] = {}
        self._frontend: Frontend | None = None
        outboxes = [Outbox(end.scheduler) for end in ends]
        self._replicas = self._make_replicas(child, outboxes) if replicas.has_router else None
        self.scheduler: SchedulerLink = self._replicas or outboxes[0]

    def _make_replicas(self, child: Child, outboxes: list[Outbox]) -> Replicas:
        page_size, limits = child.config.worker.page_size, child.config.scheduler
        block_tokens = page_size * pages_per_block(page_size)
        args = child.config.replicas
        count = args.num_slots
        router = Router[RouterKey](
            args.load_balance_method, count, block_tokens, page_size, limits.max_queued_requests
        )

        def report_load(num_open: int) -> None:
            child.control.report("replica", replica=-1, state="load", argument=str(num_open))

        def on_recalled(number: int) -> None:
            child.control.report("replica", replica=number, state="recalled")

        replicas = Replicas(
            count, router, block_tokens, self._deliver, on_recalled, self._show,
            on_known=self._on_known,
        )  # fmt: skip
        if args.follows_load:
            requests = replicas.requests
            requests.on_change = LoadReport(lambda: len(requests), report_load).on_change
        for number, outbox in enumerate(outboxes):
            replicas.join(number, outbox)
        return replicas

    def _deliver(self, client: bytes, payload: bytes, delivered: Delivered) -> None:
        assert self._frontend is not None
        self._frontend.deliver(client, payload, delivered)

    def _on_known(self, names: set[Name]) -> None:
        assert self._frontend is not None
        self._frontend.intake.on_known(names)

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
        """Take in what the launcher says of the processes and replicas."""
        name, _, number = argument.partition("/")
        replicas = self._replicas
        if replicas is None:
            if command is Command.RESTARTED and name == "scheduler_proc":
                frontend.intake.on_scheduler_restarted()
        elif command is Command.JOINED:
            self._join(replicas, *argument.split())
        elif command is Command.LOST:
            replicas.on_lost(int(argument))
            self._close_node_link(int(argument))
        elif command is Command.LEFT:
            replicas.on_left(int(argument))
            self._close_node_link(int(argument))
        elif command is Command.RECALL:
            replicas.recall(int(argument))
        elif number and command is Command.DIED:
            replicas.on_died(int(number), name)
        elif number:
            replicas.on_restarted(int(number), name)

    def _join(self, replicas: Replicas, number_text: str, scheduler: str, delivery: str) -> None:
        """Connect to a replica of the cluster, unless that was done before."""
        number, links = int(number_text), NodeLinks(scheduler, delivery, self._key_dir)
        known = self._node_links.get(number)
        if known is not None and known.links == links:
            return
        replicas.on_lost(number)
        self._close_node_link(number)
        link = self._node_links[number] = NodeLink(
            links,
            partial(replicas.on_delivery, number),
            partial(replicas.on_link_broken, number),
        )
        replicas.join(number, link.outbox)
        replicas.on_link_broken(number)

    def _close_node_link(self, number: int) -> None:
        link = self._node_links.pop(number, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Close the sockets of results."""
        for port in self._ports:
            port.close()
        for link in self._node_links.values():
            link.close()
