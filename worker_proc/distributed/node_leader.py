"""Lead ranks on several machines: those of this machine as ever, the others over TCP.

A rank crew (cluster_proc/rank_crew.py) keeps the ranks of each further machine, which wait for
JoinRanks. Rank 0 and each of them watch a connection to the other; if one breaks, both ends exit,
and the worker starts again, as after the death of a rank on this machine.
"""

from collections.abc import Callable

from quadriga.runtime.child import Child
from quadriga.wire.messages.rank import JoinRanks
from quadriga.wire.messages.worker import WorkerMessage
from quadriga.wire.node_links import host_of
from quadriga.wire.peer_watch import PeerWatch, bind_lifeline
from quadriga.wire.sockets import Outbox
from worker_proc.distributed.rendezvous import PortRendezvous
from worker_proc.distributed.tp_leader import TPLeader


class NodeLeader:
    """Ranks 1 to tp - 1, some of them on other machines.

    Attributes:
        meeting: Where all ranks meet.

    Args:
        child: This process, whose links have the addresses of the other machines' ranks.
        on_death: Called in a thread, with the reason, if a rank has exited or is out of reach.
    """

    def __init__(self, child: Child, on_death: Callable[[str], None]) -> None:
        links = child.endpoints.links
        meeting = self.meeting = PortRendezvous.open(links.host)
        here = range(1, child.replica.ranks_per_machine(child.config.worker.tp))
        self._here = TPLeader(child, on_death, meeting, here)
        self._lifeline, lifeline = bind_lifeline(links.host, links.prepare_bind)
        join = JoinRanks(meeting.address, lifeline)
        self._outboxes, self._watches = [], []
        for rank, address in enumerate(links.ranks):
            if not address:
                continue
            outbox = Outbox(address, links.prepare_connect)
            self._watches.append(PeerWatch(outbox.socket, _report_loss(rank, address, on_death)))
            self._outboxes.append(outbox)
            outbox.send(join)

    def relay(self, message: WorkerMessage) -> None:
        """Send a message to every rank."""
        self._here.relay(message)
        for outbox in self._outboxes:
            outbox.send(message)

    def close(self) -> None:
        """Leave the other machines' ranks to their crews, and wait for those of this machine."""
        for watch in self._watches:
            watch.close()
        self._here.close()
        self._lifeline.close(linger=0)


def _report_loss(rank: int, address: str, on_death: Callable[[str], None]) -> Callable[[], None]:
    """Return what reports the loss of one rank."""
    return lambda: on_death(
        f"rank {rank} of the worker, on machine {host_of(address)}, has died or is out of reach;"
        " its log there may say why"
    )
