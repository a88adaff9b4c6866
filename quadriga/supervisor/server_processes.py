"""The processes of a server: which there are, and what the death of one means for the requests."""

from collections.abc import Callable, Iterable

from quadriga.clock import Countdown
from quadriga.config.server_config import ServerConfig
from quadriga.runtime.control_channel import Command
from quadriga.supervisor.child_process import ReplicaChange
from quadriga.supervisor.cluster_replicas import ClusterReplicas
from quadriga.supervisor.console import say
from quadriga.supervisor.events import Death, ReadyAgain, SupervisorEvent
from quadriga.supervisor.replicas import FRONTEND, ReplicaProcesses
from quadriga.supervisor.supervisor import Supervisor

GATEWAY = "http_proc"
CLIENT_FACING = (FRONTEND, GATEWAY)
# Time in which frontend and gateway report to the clients why the server ends.
NOTIFY_TIMEOUT_S = 1.5


class ServerProcesses(Supervisor):
    """Supervises the processes of one server, and keeps the frontend informed of the others.

    Args:
        config: the server's flags.
        flags: command line flags of every process.
        program_of: returns the command that runs a process, before its flags.

    Attributes:
        replicas: the processes of each replica.
    """

    def __init__(
        self, config: ServerConfig, flags: list[str], program_of: Callable[[str], list[str]]
    ) -> None:
        in_cluster = config.replicas.in_cluster
        self.replicas = ClusterReplicas(config) if in_cluster else ReplicaProcesses(config)
        self._has_gateway = not config.http.no_http
        super().__init__(flags, program_of, config.launch, self.replicas.no_restart)

    def start_all(self) -> None:
        """Start every process."""
        for name in (*self.replicas.processes, FRONTEND):
            self.start(name)
        if self._has_gateway:
            self.start(GATEWAY)

    def next_event(self, timeout: Countdown | None) -> Death | SupervisorEvent | None:
        """Wait for the next event, and pass on what the frontend and the replicas have to know.

        Args:
            timeout: as in `Supervisor.next_event`.

        Returns:
            None also after what only the frontend or the replicas have to know.
        """
        event = super().next_event(timeout)
        match event:
            case ReadyAgain():
                self[FRONTEND].send(Command.RESTARTED, event.name)
                return None
            case ReplicaChange():
                self.replicas.on_report(event, self)
                return None
            case SupervisorEvent.RESTARTED:
                self.replicas.report_lost(self[FRONTEND])
        return event

    # --- deaths -----------------------------------------------------------------------------------

    def restart(self, death: Death) -> bool:
        """Schedule the restart of a process that died; return False if it must not be restarted."""
        if death.restart_delay_s is None:
            return False
        fate = (
            "by ZeroMQ and resumable streams go on, others by HTTP are lost"
            if death.name == GATEWAY
            else "go on"
        )
        say(
            f"{death.name} died ({death.reason}) and is restarted; requests {fate}",
            event="process_died", child=death.name, reason=death.reason,
            restart_delay_s=death.restart_delay_s,
        )  # fmt: skip
        self.replicas.on_restart(death.name, self)
        self.start_later(death.name, death.restart_delay_s)
        return True

    def survives(self, death: Death) -> bool:
        """Go on after a death: restart the process, or leave its replica to the others.

        Returns:
            False if the server ends with it.
        """
        return self.restart(death) or self.replicas.lose(death, self)

    def give_up(self, death: Death) -> None:
        """Report to the clients which process died for good: the server ends."""
        message = f"{death.name} died ({death.reason}); all open requests are lost"
        self.fail_clients(f"{message}; the server is stopping, start it again")
        say(
            f"error: {message}. Start the server again; its log above may say why.",
            event="process_died", child=death.name, reason=death.reason, restart_delay_s=None,
        )  # fmt: skip

    def fail_clients(self, message: str, names: Iterable[str] = CLIENT_FACING) -> None:
        """Make frontend and gateway, or those of them in `names`, fail open requests and exit."""
        countdown = Countdown(NOTIFY_TIMEOUT_S)
        children = [c for c in self if c.name in names and not c.has_exited]
        for child in children:
            child.send(Command.FAIL, message)
        for child in children:
            if not child.exits_within(countdown):
                child.process.kill()
