"""The replicas of a server, as the launcher sees them: their processes, reloads, and losses."""

import os
from collections import deque
from contextlib import suppress
from typing import Any

from quadriga.config.replica_args import journal_dir
from quadriga.config.server_config import ServerConfig
from quadriga.runtime.child import replica_of
from quadriga.runtime.control_channel import Command
from quadriga.runtime.cpu_affinity import num_usable_cores
from quadriga.supervisor.child_process import ChildProcess, ReplicaChange
from quadriga.supervisor.console import say
from quadriga.supervisor.events import Death
from quadriga.supervisor.supervisor import Supervisor

WORKER, SCHEDULER, DETOK = RING = ("worker_proc", "scheduler_proc", "detok_proc")
FRONTEND = "tokenizer_proc"
RECALLED = "recalled"  # state of a ReplicaChange
# The journal of a lost replica, whose requests are in the journals of others.
JOURNAL, MOVED_JOURNAL = "journal", "journal.moved"


class ReplicaProcesses:
    """Names of the processes of each replica, and which replicas are lost.

    A server of one replica has processes without a number, and cannot lose it.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._count = config.replicas.dp
        self._lost: set[int] = set()
        self._to_reload: deque[str] = deque()
        self._reloading = ""
        self._recalling: int | None = None

    def _names(self, program: str) -> list[str]:
        if self._count == 1:
            return [program]
        live = (number for number in range(self._count) if number not in self._lost)
        return [f"{program}/{number}" for number in live]

    @property
    def processes(self) -> list[str]:
        """Names of the processes of all replicas that are not lost."""
        return [name for program in RING for name in self._names(program)]

    @property
    def workers(self) -> list[str]:
        """Names of the workers."""
        return self._names(WORKER)

    @property
    def schedulers(self) -> list[str]:
        """Names of the schedulers."""
        return self._names(SCHEDULER)

    @property
    def no_restart(self) -> list[str]:
        """Names of the processes whose state cannot be rebuilt.

        With several replicas the frontend has what a scheduler without a journal loses.
        """
        is_lost = self._config.scheduler.no_journal and not self._config.replicas.has_router
        return self.schedulers if is_lost else []

    def cores_note(self, worker: dict[str, Any]) -> str:
        """Return a line for workers that have to share cores; "" if they do not.

        Args:
            worker: what a worker reported when it was ready.
        """
        num_workers = self._count * self._config.worker.tp
        threads, num_cores = worker.get("threads") or 0, num_usable_cores()
        if self._count == 1 or worker.get("device") != "cpu" or num_workers * threads <= num_cores:
            return ""
        plural = "" if threads == 1 else "s"
        return f"  {num_workers} workers share {num_cores} cores, {threads} thread{plural} each"

    def drained(self, supervisor: Supervisor) -> list[ChildProcess]:  # noqa: ARG002
        """Return the processes that a drain begins with, but for those that have clients."""
        return []

    def on_restart(self, name: str, supervisor: Supervisor) -> None:
        """Say to the frontend that a process has died, and is about to be restarted."""
        if replica_of(name) is not None:
            supervisor[FRONTEND].send(Command.DIED, name)

    # --- losses -----------------------------------------------------------------------------------

    def lose(self, death: Death, supervisor: Supervisor) -> bool:
        """Leave the requests of a process that died for good to the other replicas.

        Return False if there is no other one.
        """
        number = replica_of(death.name)
        if number is None or len(self._lost) + 1 >= self._count:
            return False
        self._lost.add(number)
        supervisor.abandon(number)
        self.report_lost(supervisor[FRONTEND])
        if journal := self._config.scheduler.journal:
            directory = journal_dir(journal, number)
            with suppress(OSError):
                os.replace(directory / JOURNAL, directory / MOVED_JOURNAL)
        say(
            f"error: replica {number} is lost: {death.name} died ({death.reason}). Its requests go"
            f" on at the others, {self._count - len(self._lost)} of {self._count} replicas serve;"
            " start the server again to have all",
            event="replica_lost", replica=number, child=death.name, reason=death.reason,
        )  # fmt: skip
        return True

    def report_lost(self, frontend: ChildProcess) -> None:
        """Say to the frontend, which may be a new one, which replicas are lost or recalled."""
        for number in sorted(self._lost):
            frontend.send(Command.LOST, str(number))
        if self._recalling is not None:
            frontend.send(Command.RECALL, str(self._recalling))

    # --- reloads ----------------------------------------------------------------------------------

    @property
    def reload_note(self) -> str:
        """What a reload does."""
        if self._count == 1:
            return "the worker restarts; requests go on with the new weights"
        return (
            "the workers restart one after the other; the requests of each go on at the others"
            " meanwhile"
        )

    def begin_reload(self) -> None:
        """Restart the workers, one after the other.

        Several replicas give their requests to the others before.
        """
        self._to_reload = deque(self.workers)

    def reload_next(self, supervisor: Supervisor) -> None:
        """Restart the next worker of a reload, once the one before it is ready."""
        if self._reloading:
            child = supervisor[self._reloading]
            is_over = child.is_ready and self._recalling is None
            if not (is_over or child.is_abandoned):
                return
            self._reloading, self._recalling = "", None
        if self._to_reload:
            self._reloading = self._to_reload.popleft()
            self._recalling = replica_of(self._reloading)
            if self._recalling is None:
                supervisor[self._reloading].stop_for_reload()
            else:
                supervisor[FRONTEND].send(Command.RECALL, str(self._recalling))

    def on_report(self, report: ReplicaChange, supervisor: Supervisor) -> None:
        """Restart the worker of a replica whose requests go on at the others."""
        if report.state == RECALLED and report.replica == self._recalling:
            self._recalling = None
            supervisor[self._reloading].stop_for_reload()
