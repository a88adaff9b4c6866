"""The other ranks of a worker that is several processes, seen from rank 0.

Rank 0 is the worker for the rest of the server: it alone receives plans and sends results. It
starts the others itself and hands every message on before it acts on it; so nobody else has to know
how many there are, and they live and die with it: it ends when one of them does, which the launcher
sees as the death of a worker like any other.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from quadriga import clock
from quadriga.runtime.child import Child
from quadriga.runtime.parent_death import continue_at_parents_death
from quadriga.wire.messages.worker import WorkerMessage
from quadriga.wire.sockets import Outbox

LEAVE_SECONDS = 5.0


class TPLeader:
    """Ranks 1 to tp - 1. died: called in a thread of its own, with which one and how, where one
    ends that was not told to. store: the file by which all ranks find each other."""

    def __init__(self, child: Child, died: Callable[[str], None]) -> None:
        run_dir = child.endpoints.run_dir
        self.store = run_dir / f"ranks-{os.getpid()}"
        self._died = died
        self._stopping = False
        ranks = range(1, child.config.worker.tp)
        self._processes = {rank: self._start(rank, run_dir, child) for rank in ranks}
        self._outboxes = [Outbox(child.endpoints.rank(rank)) for rank in ranks]
        for rank in ranks:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def relay(self, message: WorkerMessage) -> None:
        for outbox in self._outboxes:
            outbox.send(message)

    def close(self) -> None:
        """They were told to stop."""
        self._stopping = True
        for process in self._processes.values():
            try:
                process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, rank: int, run_dir: Path, child: Child) -> "subprocess.Popen[bytes]":
        """Its standard input ends when this process does, whatever becomes of it."""
        command = [
            sys.executable,
            "-m",
            "worker_proc.distributed.tp_rank",
            str(rank),
            str(self.store),
        ]
        command += ["--run-dir", str(run_dir), f"--clock-offset={clock.offset()}"]
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
            self._died(f"rank {rank} of the worker died ({how}); its log above may say why")
