"""The processes of a server: which there are, what the death of one means, and how a server stops.

After a signal open requests finish, or are aborted in the end (ServerDrain).
"""

from collections.abc import Callable, Iterable

from quadriga.clock import Countdown
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.child_process import EXIT_GRACE_S, ReplicaChange
from quadriga.server.processes.control_channel import EXIT_CHILD_DIED, EXIT_FORCED, EXIT_OK, Command
from quadriga.server.processes.logs import say
from quadriga.server.processes.replicas import FRONTEND, ClusterReplicas, ReplicaProcesses
from quadriga.server.processes.supervisor import Death, ReadyAgain, Supervisor, SupervisorEvent

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
                self.replicas.on_ready_again(event.name, self)
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
        if death.is_reload:
            say(
                f"{death.name} is replaced for the reload; requests go on with the new weights",
                event="process_replaced", child=death.name,
            )  # fmt: skip
            self._start_again(death)
            return True
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
        self._start_again(death)
        return True

    def _start_again(self, death: Death) -> None:
        self.replicas.on_restart(death.name, self)
        self.start_later(death.name, death.restart_delay_s or 0.0)

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


STOPPED_AT_ONCE = "the server was stopped at once, before this request had finished"
# Time after --shutdown-timeout in which the aborted requests are answered.
ABORT_TIMEOUT_S = 5.0


class ServerDrain:
    """Drains the processes of a server, each of which exits when it has nothing left.

    Args:
        processes: the server's.
        timeout_s: seconds that open requests may go on.
        has_journal: clients of the ZeroMQ socket wait for a server that resumes their requests,
            where this one is stopped by force.
    """

    def __init__(self, processes: ServerProcesses, timeout_s: float, has_journal: bool) -> None:
        self._processes = processes
        self._timeout_s = timeout_s
        self._has_journal = has_journal

    def run(self) -> int:
        """Finish open requests, or abort them when their time is over; return the exit code."""
        timeout = self._timeout_s
        say(f"stopping: open requests have {timeout:g} s; a second signal ends them now")
        self._processes.cancel_start(GATEWAY)
        self._send_drain()
        outcome = self._wait_for_exits(timeout)
        if outcome is None:
            say(f"{timeout:g} s are over: aborting the requests that are left")
            reason = "the server stopped before this request had finished"
            for name in (FRONTEND, *self._processes.replicas.schedulers):
                self._processes[name].send(Command.ABORT, reason)
            outcome = self._wait_for_exits(ABORT_TIMEOUT_S)
        if outcome is None:
            say("error: some process did not stop in time and is killed")
            return EXIT_FORCED
        if outcome == EXIT_OK:
            say("stopped")
        return outcome

    def _send_drain(self) -> None:
        client_facing = [child for child in self._processes if child.name in CLIENT_FACING]
        for child in (*client_facing, *self._processes.replicas.drained(self._processes)):
            child.send(Command.DRAIN)

    def _wait_for_exits(self, timeout: float) -> int | None:
        """Return the exit code once every process has exited or one has failed; None at timeout."""
        countdown, grace = Countdown(timeout), None
        while not self._processes.all_exited:
            grace = self._exit_grace(grace)
            event = self._processes.next_event(countdown)
            match event:
                case Death() if event.is_clean or event.name == GATEWAY:
                    continue  # the streams of a gateway that died are broken; no new ones may come
                case Death() if self._all_is_delivered:
                    self._kill_ring()
                case Death():
                    if not self._processes.survives(event):
                        self._processes.give_up(event)
                        return EXIT_CHILD_DIED
                case SupervisorEvent.RESTARTED:
                    self._send_drain()
                case SupervisorEvent.STOP:
                    return self._stop_at_once()
                case SupervisorEvent.TIMEOUT:
                    return None
        return EXIT_OK

    def _stop_at_once(self) -> int:
        """Stop after a second signal."""
        say("second signal: stopped at once")
        names = (GATEWAY,) if self._has_journal else CLIENT_FACING
        self._processes.fail_clients(STOPPED_AT_ONCE, names)
        return EXIT_FORCED

    def _exit_grace(self, countdown: Countdown | None) -> Countdown | None:
        """Return the countdown from the delivery of everything on; kill the ring at its end.

        A process that hangs or was stopped does not exit.
        """
        if countdown is None:
            return Countdown(EXIT_GRACE_S) if self._all_is_delivered else None
        if not countdown.left():
            self._kill_ring()
        return countdown

    @property
    def _all_is_delivered(self) -> bool:
        """Whether the clients have everything.

        The frontend exits when they do, and the scheduler when the frontend exits.
        """
        names = (FRONTEND, *self._processes.replicas.schedulers)
        children = (self._processes[name] for name in names)
        return any(child.has_exited and child.process.returncode == EXIT_OK for child in children)

    def _kill_ring(self) -> None:
        """Kill what waits for a message of a dead process; the gateway may still write."""
        for child in self._processes:
            if child.name != GATEWAY and not child.has_exited:
                child.process.kill()
