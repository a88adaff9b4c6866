"""The replicas of a server, as the launcher sees them: their processes, reloads, and losses.

Those of this machine, then those of a cluster: one process drives them and reports on them.
"""

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from quadriga.server.config import engine_args, server_config
from quadriga.server.processes.child_process import ChildProcess, ReplicaChange
from quadriga.server.processes.control_channel import Command
from quadriga.server.processes.logs import say
from quadriga.server.processes.machine import num_usable_cores
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.supervisor import Death

WORKER, SCHEDULER, DETOK = RING = ("worker_proc", "scheduler_proc", "detok_proc")
FRONTEND = "tokenizer_proc"
RECALLED = "recalled"  # state of a ReplicaChange
# The journal of a lost replica, whose requests are in the journals of others.
JOURNAL, MOVED_JOURNAL = "journal", "journal.moved"


class Processes(Protocol):
    """The processes of a model, by their names in it."""

    def __getitem__(self, name: str) -> ChildProcess:
        """Return a process that was started."""

    def abandon(self, names: Iterable[str]) -> None:
        """Kill processes for good, and wait until they are gone."""


class ReplicaProcesses:
    """Names of the processes of each replica, and which replicas are lost: never the last one.

    Args:
        config: the flags of the model.
        model: name of the model, where the server has several; "" else.
    """

    def __init__(self, config: server_config.ServerConfig, model: str = "") -> None:
        self._config = config
        self._of_model = f" of {model}" if model else ""
        self._count = config.replicas.dp
        self._lost: set[int] = set()
        self._to_reload: deque[str] = deque()
        self._reloading = ""
        self._recalling: int | None = None

    def _names(self, program: str) -> list[str]:
        live = (number for number in range(self._count) if number not in self._lost)
        return [self._config.replicas.process_name(program, number) for number in live]

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

        Where requests can move, the frontend has what a scheduler without a journal loses.
        """
        is_lost = self._config.scheduler.no_journal and not self._config.replicas.survives_loss
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

    def drained(self, processes: Processes) -> list[ChildProcess]:  # noqa: ARG002
        """Return the processes that a drain begins with, but for those that have clients."""
        return []

    def on_restart(self, name: str, processes: Processes) -> None:
        """Say to the frontend that a process of a replica has died, and will be restarted."""
        if name in self.processes:
            processes[FRONTEND].send(Command.DIED, name)

    def on_ready_again(self, name: str, processes: Processes) -> None:
        """Say to the frontend that a process of a replica is ready again."""
        if name in self.processes:
            processes[FRONTEND].send(Command.RESTARTED, name)

    # --- losses -----------------------------------------------------------------------------------

    def lose(self, death: Death, processes: Processes) -> bool:
        """Leave the requests of a process that died for good to the other replicas.

        Return False if there is no other one.
        """
        if death.name not in self.processes or len(self._lost) + 1 >= self._count:
            return False
        number = ProcessName.parse(death.name).replica or 0
        self._lost.add(number)
        processes.abandon(self._config.replicas.process_name(program, number) for program in RING)
        self.report_lost(processes[FRONTEND])
        if journal := self._config.scheduler.journal:
            directory = engine_args.journal_dir(journal, number)
            with suppress(OSError):
                os.replace(directory / JOURNAL, directory / MOVED_JOURNAL)
        say(
            f"error: replica {number}{self._of_model} is lost: {death.name} died ({death.reason})."
            f" Its requests go on at the others, {self._count - len(self._lost)} of {self._count}"
            " replicas serve; start the server again to have all",
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

    def begin_reload(self, workers: Iterable[ChildProcess]) -> None:
        """Restart the workers, one after the other.

        Each replica gives its requests to the others before, where there are others. A model that
        is unloaded has no worker, and reads its files again when it is loaded.

        Args:
            workers: those that were started.
        """
        running = [child for child in workers if not child.is_abandoned]
        self._to_reload = deque(ProcessName.parse(child.name).in_model for child in running)

    def reload_next(self, processes: Processes) -> None:
        """Restart the next worker of a reload, once the one before it is ready."""
        if self._reloading:
            child = processes[self._reloading]
            is_over = child.is_ready and self._recalling is None
            if not (is_over or child.is_abandoned):
                return
            self._reloading, self._recalling = "", None
        if self._to_reload:
            self._reloading = self._to_reload.popleft()
            self._recalling = ProcessName.parse(self._reloading).replica or 0
            processes[FRONTEND].send(Command.RECALL, str(self._recalling))

    def on_report(self, report: ReplicaChange, processes: Processes) -> None:
        """Restart the worker of a replica whose requests go on at the others."""
        if report.state == RECALLED and report.replica == self._recalling:
            self._recalling = None
            processes[self._reloading].stop_for_reload()


# The driver of a cluster (cluster_proc) reports each change; here it is kept, for a frontend that
# is restarted, and passed on.

DRIVER = "cluster_proc"
# Further states of a ReplicaChange.
JOINED, DIED, RESTARTED, LOST = "joined", "died", "restarted", "lost"
LEAVING, LEFT = "leaving", "left"


class ClusterReplicas(ReplicaProcesses):
    """Which replicas of a cluster have joined."""

    def __init__(self, config: server_config.ServerConfig, model: str = "") -> None:
        super().__init__(config, model)
        self._joined: dict[int, str] = {}
        self._dead: set[str] = set()
        self._leaving: set[int] = set()
        self._load = ""
        self._reloads: deque[int] = deque()
        self._in_reload: int | None = None

    @property
    def processes(self) -> list[str]:
        """Names of the processes on this machine."""
        return [DRIVER]

    @property
    def workers(self) -> list[str]:
        """The process that reports what a worker has reported."""
        return [DRIVER]

    @property
    def schedulers(self) -> list[str]:
        """None on this machine: the driver passes on what concerns them."""
        return [DRIVER]

    def drained(self, processes: Processes) -> list[ChildProcess]:
        """Return the driver, which must not start lost replicas again."""
        return [processes[DRIVER]]

    def cores_note(self, worker: dict[str, Any]) -> str:  # noqa: ARG002
        """Return "": each worker has the cores of its own machine."""
        return ""

    # --- changes ----------------------------------------------------------------------------------

    def on_report(self, report: ReplicaChange, processes: Processes) -> None:
        """Keep a change, and pass it on to the frontend."""
        number, frontend = report.replica, processes[FRONTEND]
        match report.state:
            case "joined":
                self._on_joined(number, report.argument, processes)
            case "leaving":
                self._leaving.add(number)
                frontend.send(Command.RECALL, str(number))
            case "left":
                self._on_left(number, frontend)
            case "load":
                self._load = report.argument
                processes[DRIVER].send(Command.LOAD, self._load)
            case "lost":
                self._on_lost(number, report.argument, frontend)
            case "died":
                self._dead.add(report.argument)
                frontend.send(Command.DIED, report.argument)
            case "restarted":
                self._dead.discard(report.argument)
                frontend.send(Command.RESTARTED, report.argument)
                self._end_reload(number, report.argument)
            case "recalled" if number in self._leaving:
                processes[DRIVER].send(Command.REMOVE, str(number))
            case "recalled" if number == self._in_reload:
                processes[DRIVER].send(Command.RELOAD, str(number))

    def _on_joined(self, number: int, addresses: str, processes: Processes) -> None:
        self._joined[number] = addresses
        if number in self._lost or processes[DRIVER].is_ready:
            again = " again" if number in self._lost else ""
            self._lost.discard(number)
            say(
                f"replica {number}{self._of_model} has joined{again}: {self._serving}",
                event="replica_joined", replica=number,
            )  # fmt: skip
        processes[FRONTEND].send(Command.JOINED, f"{number} {addresses}")
        if self._load:  # a driver that was restarted does not know it
            processes[DRIVER].send(Command.LOAD, self._load)

    def _on_left(self, number: int, frontend: ChildProcess) -> None:
        self._leaving.discard(number)
        self._lost.discard(number)
        if self._joined.pop(number, None) is None:
            return
        self._forget_processes(number)
        frontend.send(Command.LEFT, str(number))
        self._end_reload(number)
        say(
            f"replica {number}{self._of_model} has left, as there is little to do: {self._serving}",
            event="replica_left", replica=number,
        )  # fmt: skip

    @property
    def _serving(self) -> str:
        """How many replicas serve."""
        count = len(self._joined)
        if self._config.replicas.follows_load:
            return "1 replica serves" if count == 1 else f"{count} replicas serve"
        return f"{count} of {self._count} replicas serve"

    def _forget_processes(self, number: int) -> None:
        self._dead = {name for name in self._dead if not name.endswith(f"/{number}")}

    def _on_lost(self, number: int, reason: str, frontend: ChildProcess) -> None:
        if self._joined.pop(number, None) is None:
            return
        self._forget_processes(number)
        self._lost.add(number)
        frontend.send(Command.LOST, str(number))
        self._end_reload(number)
        fate = "go on at the others" if self._joined else "wait for a replica"
        next_step = "it is started again where the cluster has room"
        if number in self._leaving:
            next_step = "it was about to leave"
        say(
            f"error: replica {number}{self._of_model} is lost: {reason}. Its requests {fate},"
            f" {self._serving}; {next_step}",
            event="replica_lost", replica=number, reason=reason,
        )  # fmt: skip

    def on_restart(self, name: str, processes: Processes) -> None:
        """Handle the death of a process of this machine: all replicas end with the driver."""
        if name == DRIVER:
            self._leaving.clear()
            for number in list(self._joined):
                self._on_lost(number, "the driver of the cluster has died", processes[FRONTEND])

    def on_ready_again(self, name: str, processes: Processes) -> None:
        """Say nothing to the frontend: the driver reports what concerns the replicas."""

    def report_lost(self, frontend: ChildProcess) -> None:
        """Say to the frontend, which may be a new one, which replicas there are."""
        for number, addresses in self._joined.items():
            frontend.send(Command.JOINED, f"{number} {addresses}")
        for name in self._dead:
            frontend.send(Command.DIED, name)
        for number in self._joined:
            if number in self._leaving or number == self._in_reload:
                frontend.send(Command.RECALL, str(number))

    # --- reloads ----------------------------------------------------------------------------------

    def begin_reload(self, workers: Iterable[ChildProcess]) -> None:  # noqa: ARG002
        """Restart the workers, one after the other, each after its requests have moved."""
        self._reloads = deque(sorted(self._joined))

    def reload_next(self, processes: Processes) -> None:
        """Recall the next replica of a reload, once the one before it has its new worker."""
        if self._in_reload is None and self._reloads:
            number = self._reloads.popleft()
            if number in self._joined:
                self._in_reload = number
                processes[FRONTEND].send(Command.RECALL, str(number))

    def _end_reload(self, number: int, process: str = "") -> None:
        if number == self._in_reload and process in ("", f"{WORKER}/{number}"):
            self._in_reload = None
