"""The processes of one of a server's models: its frontend, and the replicas behind it."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quadriga.clock import Countdown
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.model_list import ModelEntry
from quadriga.server.processes.child_process import ChildProcess
from quadriga.server.processes.control_channel import EXIT_OK, Command
from quadriga.server.processes.logs import say
from quadriga.server.processes.process_name import ProcessName
from quadriga.server.processes.replicas import FRONTEND, ClusterReplicas, ReplicaProcesses
from quadriga.server.processes.supervisor import START_RETRY_S, Supervisor
from quadriga.wire.client import PRIVATE_ENDPOINT
from quadriga.wire.links import Endpoints


class ModelPlan(NamedTuple):
    """A model that a server is to serve.

    Attributes:
        name: what its processes are called after; "" where the server has one model.
        config: its flags.
        flags: command line flags of its processes, which reproduce `config`.
        aliases: other names of the model.
        preload: the server is ready when the model is loaded; else a request loads it.
        is_pinned: it is never unloaded to make room for others.
        idle_unload_s: seconds without a request after which it is unloaded; None: never.
        num_bytes: expected memory of its workers.
    """

    name: str
    config: ServerConfig
    flags: list[str]
    aliases: Sequence[str] = ()
    preload: bool = True
    is_pinned: bool = False
    idle_unload_s: float | None = None
    num_bytes: int = 0

    @property
    def shown_name(self) -> str:
        """What people and clients call the model."""
        return self.name or self.config.model.shown_name


class Ring(NamedTuple):
    """The processes of a replica that exchange steps."""

    scheduler: ChildProcess
    worker: ChildProcess


class ModelProcesses:
    """The processes of a model, under the names that they have in the model.

    Args:
        plan: the model.
        number: number of the model in the server, from 0 on.

    Attributes:
        plan: the model.
        replicas: the processes of each replica.
        lost: why they have ended for good, and other models are served; "": they have not.
    """

    def __init__(self, plan: ModelPlan, number: int) -> None:
        self.plan = plan
        in_cluster = plan.config.replicas.in_cluster
        kind = ClusterReplicas if in_cluster else ReplicaProcesses
        self.replicas: ReplicaProcesses = kind(plan.config, plan.name)
        self.lost = ""
        self._number = number
        self._server: Supervisor | None = None

    def open(self, server: Supervisor) -> None:
        """Start, find and end the processes in this supervisor from now on."""
        self._server = server

    @property
    def server(self) -> Supervisor:
        """The supervisor of the processes."""
        assert self._server is not None, "open comes first"
        return self._server

    def directory(self, run_dir: Path) -> Path:
        """Return the directory of the model's sockets. Its name is in the journal."""
        return run_dir / f"{run_dir.name}-m{self._number}" if self.plan.name else run_dir

    def public_endpoint(self, run_dir: Path) -> str:
        """Return the address of the model's public socket."""
        endpoint = self.plan.config.frontend.endpoint
        is_private = endpoint == PRIVATE_ENDPOINT
        return Endpoints(self.directory(run_dir)).public if is_private else endpoint

    def entry(self, run_dir: Path) -> ModelEntry:
        """Return what the gateway has to know of the model."""
        plan, endpoint = self.plan, self.public_endpoint(run_dir)
        return ModelEntry(
            name=plan.name,
            endpoint=endpoint,
            aliases=list(plan.aliases),
            flags=plan.flags,
            lost=self.lost,
            preload=plan.preload,
        )

    def full_name(self, name: str) -> str:
        """Return the name in the server of a process of the model."""
        return str(ProcessName.parse(name)._replace(model=self.plan.name))

    def __getitem__(self, name: str) -> ChildProcess:
        return self.server[self.full_name(name)]

    def __iter__(self) -> Iterator[ChildProcess]:
        """Yield the processes that were started, and are not those of a lost replica."""
        names = (self.full_name(name) for name in (*self.replicas.processes, FRONTEND))
        return (self.server[name] for name in names if name in self.server)

    @property
    def frontend(self) -> ChildProcess:
        """The frontend."""
        return self[FRONTEND]

    @property
    def no_restart(self) -> list[str]:
        """Names in the server of the processes whose state cannot be rebuilt."""
        return [self.full_name(name) for name in self.replicas.no_restart]

    def start(self) -> None:
        """Start every process but the workers."""
        workers = self.replicas.workers
        for name in (*self.replicas.processes, FRONTEND):
            if name not in workers:
                self.server.start(self.full_name(name))

    @property
    def workers(self) -> list[ChildProcess]:
        """The workers that were started."""
        names = map(self.full_name, self.replicas.workers)
        return [self.server[name] for name in names if name in self.server]

    @property
    def schedulers(self) -> list[ChildProcess]:
        """The schedulers."""
        return [self[name] for name in self.replicas.schedulers]

    @property
    def rings(self) -> list[Ring]:
        """Scheduler and worker of each replica whose worker was started."""
        pairs = zip(self.replicas.schedulers, self.replicas.workers, strict=True)
        started = self.server
        return [Ring(self[s], self[w]) for s, w in pairs if self.full_name(w) in started]

    @property
    def is_loaded(self) -> bool:
        """Whether every worker serves."""
        workers = self.workers
        are_started = len(workers) == len(self.replicas.workers)
        return are_started and all(worker.is_ready for worker in workers)

    def start_workers(self) -> None:
        """Start the workers, at once or when the system has room for a process: load the model."""
        for name in map(self.full_name, self.replicas.workers):
            try:
                self.server.start(name)
            except OSError as error:
                say(f"{name} cannot be started now ({error}): tried again in {START_RETRY_S:g} s")
                self.server.start_later(name, START_RETRY_S)

    def end_workers(self) -> None:
        """End the workers, which are not restarted: unload the model."""
        for name in self.replicas.workers:
            self.replicas.on_restart(name, self)
        self.abandon(self.replicas.workers)

    def abandon(self, names: Iterable[str]) -> None:
        """Kill processes for good, as far as they were started, and wait until they are gone."""
        self.server.abandon(map(self.full_name, names))

    def lose(self, message: str, countdown: Countdown) -> None:
        """End the processes for good, once the frontend has said why to the clients.

        Args:
            message: the reason.
            countdown: time that the frontend has for it.
        """
        self.lost = message
        self.abandon(child.name for child in self if child is not self.frontend)
        frontend = self.frontend
        if frontend.is_running:
            frontend.leave_alone()
            frontend.send(Command.FAIL, message)
            frontend.exits_within(countdown)
        self.abandon([FRONTEND])

    @property
    def all_is_delivered(self) -> bool:
        """Whether the clients have everything.

        The frontend exits when they do, and the scheduler when the frontend exits.
        """
        children = (self[name] for name in (FRONTEND, *self.replicas.schedulers))
        return any(child.has_exited and child.process.returncode == EXIT_OK for child in children)

    @property
    def is_over(self) -> bool:
        """Whether the clients have everything, and no worker has memory any more."""
        return self.all_is_delivered and all(worker.has_exited for worker in self.workers)

    def kill(self) -> None:
        """Kill every process that still runs: it waits for a message of a dead one."""
        for child in self:
            if not child.has_exited:
                child.process.kill()
