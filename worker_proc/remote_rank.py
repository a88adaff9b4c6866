"""A rank of a worker whose rank 0 is on another machine.

A rank crew (cluster_proc/crew.py) starts it as
`python -m worker_proc.remote_rank RANK --run-dir …`, and again after each end, so that it waits for
the next rank 0.
"""

import os
import sys

from quadriga.errors import ConfigError
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import EXIT_OK
from quadriga.server.processes.machine import other_version
from quadriga.wire.links import PeerWatch
from quadriga.wire.sockets import Inbox, Outbox
from quadriga.wire.worker import JoinRanks, RankMessage
from worker_proc.distributed.rendezvous import PortRendezvous
from worker_proc.tp_rank import serve_rank


def main() -> None:
    """Run the process until StopWorker, or until rank 0 has gone."""
    rank = int(sys.argv[1])
    del sys.argv[1]
    run_child(f"worker_proc rank {rank}", lambda child: body(child, rank))


def body(child: Child, rank: int) -> None:
    """Wait for rank 0, load this rank's part of the model, then handle what rank 0 relays.

    Raises:
        ConfigError: rank 0 runs another version of quadriga.
    """
    links = child.endpoints.links
    inbox: Inbox[RankMessage] = Inbox(links.rank(rank), RankMessage, links.prepare_bind)
    while not isinstance(join := inbox.receive(), JoinRanks):
        pass  # of a rank 0 that ended before this process began
    if refusal := other_version(f"rank 0 at {join.lifeline}", join.version):
        raise ConfigError(refusal)
    lifeline = Outbox(join.lifeline, links.prepare_connect)
    watch = PeerWatch(lifeline.socket, lambda: os._exit(EXIT_OK))
    serve_rank(child, rank, inbox, PortRendezvous(join.meeting, links.host), child.ready)
    watch.close()


if __name__ == "__main__":
    main()
