"""The stop of a server after a signal: open requests finish, or are aborted in the end."""

from quadriga.clock import Countdown
from quadriga.runtime.control_channel import Command
from quadriga.runtime.exit_codes import EXIT_CHILD_DIED, EXIT_FORCED, EXIT_OK
from quadriga.supervisor.child_process import EXIT_GRACE_S
from quadriga.supervisor.console import say
from quadriga.supervisor.events import Death, SupervisorEvent
from quadriga.supervisor.replicas import FRONTEND
from quadriga.supervisor.server_processes import CLIENT_FACING, GATEWAY, ServerProcesses

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
