"""Start and supervise the other ranks of a worker, on this machine and on others.

`TPLeader` leads the ranks of this machine; `NodeLeader` leads these and those of other machines.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from quadriga import __version__, clock
from quadriga.programs import command_of
from quadriga.server.processes.child import Child
from quadriga.server.processes.control_channel import continue_at_parents_death
from quadriga.wire.links import PeerWatch, bind_lifeline, host_of
from quadriga.wire.sockets import Outbox
from quadriga.wire.worker import JoinRanks, WorkerMessage
from worker_proc.distributed.rendezvous import FileRendezvous, PortRendezvous, Rendezvous

# Start and supervise the other ranks of a worker that consists of several processes.
#
# Rank 0 is the worker for the rest of the server: only rank 0 receives plans and sends results.
# It relays every message to the other ranks before it acts on it. If one of them dies, it exits,
# so the launcher sees the death of a worker like any other.

EXIT_TIMEOUT_S = 5.0


class TPLeader:
    """Ranks 1 to tp - 1.

    Attributes:
        meeting: where all ranks meet.
    """

    def __init__(
        self,
        child: Child,
        on_death: Callable[[str], None],
        meeting: Rendezvous | None = None,
        ranks: range | None = None,
    ) -> None:
        """Start the processes.

        Args:
            child: this process, whose configuration the ranks get.
            on_death: called in a thread, with the reason, if a rank exits unexpectedly.
            meeting: where all ranks meet; None: by a file of this run.
            ranks: the ranks to start; None: all of them.
        """
        run_dir = child.endpoints.run_dir
        self.meeting = meeting or FileRendezvous(run_dir / f"ranks-{os.getpid()}")
        self._on_death = on_death
        self._stopping = False
        if ranks is None:
            ranks = range(1, child.config.worker.tp)
        self._processes = {rank: self._start(rank, run_dir, child) for rank in ranks}
        self._outboxes = [Outbox(child.endpoints.rank(rank)) for rank in ranks]
        for rank in ranks:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def relay(self, message: WorkerMessage) -> None:
        """Send a message to every rank."""
        for outbox in self._outboxes:
            outbox.send(message)

    def close(self) -> None:
        """Wait for the ranks to exit after StopWorker was relayed; kill those that do not."""
        self._stopping = True
        for process in self._processes.values():
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, rank: int, run_dir: Path, child: Child) -> "subprocess.Popen[bytes]":
        """Start a rank. It reads its standard input, which ends when this process ends."""
        command = command_of("worker_proc.tp_rank")
        command += [str(rank), self.meeting.address]
        command += ["--run-dir", str(run_dir), f"--clock-offset={clock.offset()}"]
        if child.replica.num_replicas > 1:
            command += ["--replica", str(child.replica.number)]
        return subprocess.Popen(
            [*command, *child.config.to_argv()],
            stdin=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=continue_at_parents_death,
        )

    def _watch(self, rank: int) -> None:
        code = self._processes[rank].wait()
        if not self._stopping:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._on_death(f"rank {rank} of the worker died ({how}); its log above may say why")


# Lead ranks on several machines: those of this machine as ever, the others over TCP.
#
# A rank crew (cluster_proc/crew.py) keeps the ranks of each further machine, which wait for
# JoinRanks. Rank 0 and each of them watch a connection to the other; if one breaks, both ends
# exit, and the worker starts again, as after the death of a rank on this machine.


class NodeLeader:
    """Ranks 1 to tp - 1, some of them on other machines.

    Attributes:
        meeting: where all ranks meet.

    Args:
        child: this process, whose links have the addresses of the other machines' ranks.
        on_death: called in a thread, with the reason, if a rank has exited or is out of reach.
    """

    def __init__(self, child: Child, on_death: Callable[[str], None]) -> None:
        links = child.endpoints.links
        meeting = self.meeting = PortRendezvous.open(links.host)
        here = range(1, child.replica.ranks_per_machine(child.config.worker.tp))
        self._here = TPLeader(child, on_death, meeting, here)
        self._lifeline, lifeline = bind_lifeline(links.host, links.prepare_bind)
        join = JoinRanks(meeting.address, lifeline, __version__)
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
