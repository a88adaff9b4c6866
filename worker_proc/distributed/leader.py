"""Start and supervise the other ranks of a worker, on this machine and on others.

Rank 0 is the worker for the rest of the server: only rank 0 receives plans and sends results. It
relays every message to the other ranks before it acts on it. If one of them dies, it exits, so that
the launcher sees the death of a worker like any other.

A rank crew (cluster_proc/crew.py) keeps the ranks of each further machine, which wait for
JoinRanks. Rank 0 and each of them watch a connection to the other; if one breaks, both ends exit.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Callable

from quadriga import __version__, clock
from quadriga.programs import command_of
from quadriga.server.processes.child import Child
from quadriga.server.processes.control_channel import continue_at_parents_death
from quadriga.wire.links import PeerWatch, bind_lifeline, host_of
from quadriga.wire.sockets import Outbox
from quadriga.wire.worker import JoinRanks, WorkerMessage
from worker_proc.distributed.rendezvous import FileRendezvous, PortRendezvous, Rendezvous

EXIT_TIMEOUT_S = 5.0


class TPLeader:
    """Leads ranks 1 to tp - 1, of which `child.endpoints.links` names those of other machines.

    Attributes:
        meeting: where all ranks meet.
    """

    meeting: Rendezvous

    def __init__(self, child: Child, on_death: Callable[[str], None]) -> None:
        """Start the ranks of this machine, and let the others join.

        Args:
            child: this process, whose configuration the ranks get.
            on_death: called in a thread, with the reason, if a rank exits or is out of reach.
        """
        self._child = child
        self._on_death = on_death
        self._stopping = False
        self._watches: list[PeerWatch] = []
        links, tp = child.endpoints.links, child.config.worker.tp
        if links.ranks:
            self.meeting = PortRendezvous.open(links.host)
            tp = child.replica.ranks_per_machine(tp)
        else:
            self.meeting = FileRendezvous(child.endpoints.run_dir / f"ranks-{os.getpid()}")
        self._processes = {rank: self._start(rank) for rank in range(1, tp)}
        self._outboxes = [Outbox(child.endpoints.rank(rank)) for rank in self._processes]
        for rank in self._processes:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()
        if links.ranks:
            self._let_join()

    def relay(self, message: WorkerMessage) -> None:
        """Send a message to every rank."""
        for outbox in self._outboxes:
            outbox.send(message)

    def close(self) -> None:
        """Wait for the ranks of this machine after StopWorker was relayed; kill those that stay.

        Those of other machines are left to their crews.
        """
        self._stopping = True
        for watch in self._watches:
            watch.close()
        for process in self._processes.values():
            try:
                process.wait(EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._watches:
            self._lifeline.close(linger=0)

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        """Start a rank. It reads its standard input, which ends when this process ends."""
        child = self._child
        command = [*command_of("worker_proc.tp_rank"), str(rank), self.meeting.address]
        command += ["--run-dir", str(child.endpoints.run_dir), f"--clock-offset={clock.offset()}"]
        if child.replica.num_replicas > 1:
            command += ["--replica", str(child.replica.number)]
        command += ["--of-model", child.of_model] if child.of_model else []
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

    def _let_join(self) -> None:
        """Let the ranks of other machines join, and watch them."""
        links = self._child.endpoints.links
        self._lifeline, lifeline = bind_lifeline(links.host, links.prepare_bind)
        join = JoinRanks(self.meeting.address, lifeline, __version__)
        for rank, address in enumerate(links.ranks):
            if address:
                outbox = Outbox(address, links.prepare_connect)
                self._watches.append(PeerWatch(outbox.socket, self._loss_of(rank, address)))
                self._outboxes.append(outbox)
                outbox.send(join)

    def _loss_of(self, rank: int, address: str) -> Callable[[], None]:
        """Return what reports the loss of a rank."""
        return lambda: self._on_death(
            f"rank {rank} of the worker, on machine {host_of(address)}, has died or is out of"
            " reach; its log there may say why"
        )
