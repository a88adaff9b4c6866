"""The frontend's sockets to the schedulers and detokenizers of its replicas.

`ReplicaLinks` has all of them, `NodeLink` is the link with a replica on another machine, whose loss
is noticed, and `LoadReport` sends the load to the launcher, where that asks for it.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from quadriga.server.config.engine_args import ReplicaArgs, SchedulerArgs
from quadriga.server.prefix_blocks import pages_per_block
from quadriga.server.processes.child import Child
from quadriga.server.processes.control_channel import Command
from quadriga.server.processes.process_name import ProcessName
from quadriga.wire.async_sockets import AsyncPort, ConnectionWatch
from quadriga.wire.links import NodeLinks
from quadriga.wire.sockets import LinkSocket, Outbox, bind_frames
from tokenizer_proc.replicas.placed import RouterKey
from tokenizer_proc.replicas.replicas import Replicas, ResultListener
from tokenizer_proc.replicas.roles import RoleRouter, roles_of
from tokenizer_proc.replicas.router import Router

# Between two reports of the load. What begins after none was open is reported at once.
LOAD_INTERVAL_S = 1.0


class LoadReport:
    """Reports the number of open requests, and again when it has changed, at most once a second.

    Args:
        num_open: returns the number of open requests.
        report: called with the number.
        delay_s: seconds until the first report, as of a frontend that finds its requests again.
    """

    def __init__(
        self, num_open: Callable[[], int], report: Callable[[int], None], delay_s: float = 0.0
    ) -> None:
        self._num_open = num_open
        self._report = report
        self._last: int | None = None
        self._timer: asyncio.TimerHandle | None = self._look_in(delay_s)

    def on_change(self) -> None:
        """Take in that the number may have changed."""
        if self._timer is None:
            self._timer = self._look_in(LOAD_INTERVAL_S if self._last else 0.0)

    def answer(self) -> None:
        """Report the number at once, also if it has not changed."""
        self._last = self._num_open()
        self._report(self._last)

    def _look_in(self, delay_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        num_open = self._num_open()
        if num_open != self._last:
            self._last = num_open
            self._report(num_open)


class RefusalLog:
    """Logs that a machine refuses a link, or is refused: once, as it goes on trying."""

    def __init__(self, links: NodeLinks) -> None:
        self._links = links
        self._is_logged = False

    def note(self, reason: str) -> None:
        """Log a refusal, if it is the first one."""
        severity = logging.DEBUG if self._is_logged else logging.ERROR
        self._is_logged = True
        logging.log(
            severity,
            "a link to the replica at %s is refused (%s): copy this server's --curve-dir, with its"
            " inner key, to that machine",
            self._links.scheduler, reason,
        )  # fmt: skip


class WatchedOutbox(Outbox):
    """An outbox that calls back when its connection is lost. Needs a running event loop.

    What is sent to a peer that refuses the connection is lost, like all that was on a lost one.
    """

    def __init__(self, links: NodeLinks, on_loss: Callable[[], None], refusals: RefusalLog) -> None:
        self._links = links
        self._on_loss = on_loss
        self._refusals = refusals
        super().__init__(links.scheduler, self._prepare_watched)

    def _prepare_watched(self, link: LinkSocket) -> None:
        """Prepare a socket, and watch it before its first connection, which may be refused."""
        self._links.prepare_connect(link)
        self._watch = ConnectionWatch(link, self._on_loss, on_refusal=self._refusals.note)

    def _refuse(self) -> None:
        self._refusals.note("its connection has ended")

    def renew(self) -> None:
        """Reconnect; unsent messages are discarded."""
        self._watch.close()
        super().renew()

    def close(self) -> None:
        """Close the socket; what is unsent is discarded."""
        self._watch.close()
        super().close()


class NodeLink:
    """Both directions of the link with one run of a replica.

    A loss is noticed before anything is received that a later connection has brought, because each
    message looks for it first.

    Args:
        links: the addresses.
        on_frames: called with the frames of each message of its detokenizer.
        on_loss: called when a connection is lost.
    """

    def __init__(
        self,
        links: NodeLinks,
        on_frames: Callable[[list[bytes]], None],
        on_loss: Callable[[], None],
    ) -> None:
        self.links = links
        refusals = RefusalLog(links)
        self.outbox = WatchedOutbox(links, on_loss, refusals)
        results = bind_frames(links.delivery, links.prepare_bind)
        self._watch = ConnectionWatch(results, on_loss, on_refusal=refusals.note)

        def receive(frames: list[bytes]) -> None:
            self._watch.process()
            on_frames(frames)

        self._port = AsyncPort(results, receive)

    def close(self) -> None:
        """Stop receiving. A replica that was only cut off reaches nothing any more."""
        self._watch.close()
        self._port.close(linger_s=0)


class ReplicaLinks:
    """The links to the schedulers and from the detokenizers of all replicas.

    Replicas of a cluster join when the launcher says where they are.

    Attributes:
        replicas: what is sent and received by the links.
    """

    def __init__(self, child: Child) -> None:
        args = child.config.replicas
        count = 0 if args.in_cluster else args.dp
        ends = [child.endpoints.of_replica(number, count) for number in range(count)]
        self._key_dir = child.config.frontend.curve_dir
        self._control, self._is_restart = child.control, child.is_restart
        self._load_report: LoadReport | None = None
        self._sockets = [bind_frames(end.delivery) for end in ends]
        self._ports: list[AsyncPort] = []
        self._node_links: dict[int, NodeLink] = {}
        self.replicas = _make_replicas(child)
        for number, end in enumerate(ends):
            self.replicas.join(number, Outbox(end.scheduler))
        if args.in_cluster and args.follows_load:
            self._report_load()

    def open(self, listener: ResultListener) -> None:
        """Give results to the listener from now on."""
        self.replicas.listener = listener
        self._ports = [
            AsyncPort(socket, partial(self.replicas.on_delivery, number))
            for number, socket in enumerate(self._sockets)
        ]

    def on_process(self, command: Command, argument: str) -> None:
        """Take in what the launcher says of the processes and replicas."""
        replicas = self.replicas
        match command:
            case Command.DIED:
                name = ProcessName.parse(argument)
                replicas.on_died(name.replica or 0, name.program)
            case Command.RESTARTED:
                name = ProcessName.parse(argument)
                replicas.on_restarted(name.replica or 0, name.program)
            case Command.RECALL:
                replicas.recall(int(argument))
            case Command.JOINED:
                self._join(*argument.split())
            case Command.LOST:
                replicas.on_lost(int(argument))
                self._close_node_link(int(argument))
            case Command.LEFT:
                replicas.on_left(int(argument))
                self._close_node_link(int(argument))
            case Command.REPORT_LOAD:
                self._report_load()

    def _report_load(self) -> None:
        """Report the load to the launcher, now and from now on."""
        if self._load_report is not None:
            self._load_report.answer()
            return
        requests, send = self.replicas.requests, self._control.report

        def report(num_open: int) -> None:
            send("replica", replica=-1, state="load", argument=str(num_open))

        delay_s = LOAD_INTERVAL_S if self._is_restart else 0.0
        self._load_report = LoadReport(lambda: len(requests), report, delay_s)
        requests.on_change = self._load_report.on_change

    def _join(self, number_text: str, scheduler: str, delivery: str) -> None:
        """Connect to a replica of the cluster, unless that was done before."""
        number, links = int(number_text), NodeLinks(scheduler, delivery, self._key_dir)
        known = self._node_links.get(number)
        if known is not None and known.links == links:
            return
        self.replicas.on_lost(number)
        self._close_node_link(number)
        link = self._node_links[number] = NodeLink(
            links,
            partial(self.replicas.on_delivery, number),
            partial(self.replicas.on_link_broken, number),
        )
        self.replicas.join(number, link.outbox)
        self.replicas.on_link_broken(number)

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


def make_router(
    args: ReplicaArgs, limits: SchedulerArgs, count: int, block_tokens: int, page_size: int
) -> Router[RouterKey]:
    """Return the router that the flags ask for.

    Args:
        args: of the replicas.
        limits: of each scheduler.
        count: largest number of replicas.
        block_tokens: tokens of a block of the router's index.
        page_size: tokens of a page.
    """
    method, max_waiting = args.load_balance_method, limits.max_queued_requests
    if args.has_roles:
        roles = roles_of(args.prefill_replicas, count, limits)
        return RoleRouter(roles, method, count, block_tokens, page_size, max_waiting)
    return Router(method, count, block_tokens, page_size, max_waiting)


def _make_replicas(child: Child) -> Replicas:
    """Return the replicas that the flags ask for, of which none has joined yet."""
    args, limits = child.config.replicas, child.config.scheduler
    count, page_size = args.num_slots, child.config.worker.page_size
    # The only replica gets every request, wherever a prefix is cached.
    block_tokens = page_size * pages_per_block(page_size) if count > 1 else 0
    router = make_router(args, limits, count, block_tokens, page_size)

    def on_recalled(number: int) -> None:
        child.control.report("replica", replica=number, state="recalled")

    return Replicas(count, router, block_tokens, on_recalled, lists_replicas=args.survives_loss)
