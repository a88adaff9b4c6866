"""Start the four processes and the web gateway, restart those that die, and stop them.

    python launcher.py [--model smollm2-135m] [--endpoint tcp://127.0.0.1:5555] …

The launcher does no work of its own and imports no torch. Each child holds one end of a socket pair
(quadriga/runtime/control_channel.py): reports come up, commands go down, and its end reports a
death at once.
"""

import argparse
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from quadriga import errors, programs
from quadriga.clock import Countdown
from quadriga.config import server_config as configuration
from quadriga.config.frontend_args import PRIVATE_ENDPOINT
from quadriga.config.parser import ServerParser
from quadriga.config.server_config import ServerConfig
from quadriga.errors import ConfigError, QuadrigaError, ServerFailed
from quadriga.model_files.resolve import ModelFiles
from quadriga.model_files.served import find_served_model
from quadriga.runtime import terminal
from quadriga.runtime.control_channel import Command
from quadriga.runtime.exit_codes import (
    EXIT_CHILD_DIED,
    EXIT_FORCED,
    EXIT_OK,
    EXIT_START_FAILED,
    EXIT_USAGE,
)
from quadriga.runtime.logs import JSON, set_up_logging
from quadriga.runtime.open_files import MAX_OPEN_FILES, allow_open_files
from quadriga.supervisor import first_screen
from quadriga.supervisor.child_process import EXIT_GRACE_S, ReplicaChange
from quadriga.supervisor.cluster_replicas import ClusterReplicas
from quadriga.supervisor.console import say
from quadriga.supervisor.events import Death, ReadyAgain, SupervisorEvent
from quadriga.supervisor.owner import OwnerChannel
from quadriga.supervisor.replicas import FRONTEND, ReplicaProcesses
from quadriga.supervisor.supervisor import Supervisor
from quadriga.tenants.key_file import check_key_file
from quadriga.wire.endpoints import Endpoints

STARTED_AT = time.monotonic()
SERVING_PACKAGES = (
    "torch", "numpy", "tokenizers", "safetensors", "gguf", "jinja2", "uvloop", "psutil", "msgpack",
)  # fmt: skip
HTTP_PACKAGES = ("aiohttp", "prometheus_client")
GATEWAY = "http_proc"
CLIENT_FACING = (FRONTEND, GATEWAY)
STOPPED_AT_ONCE = "the server was stopped at once, before this request had finished"
# Time in which frontend and gateway report to the clients why the server ends.
NOTIFY_TIMEOUT_S = 1.5
# Time after --shutdown-timeout in which the aborted requests are answered.
ABORT_TIMEOUT_S = 5.0


class Launcher:
    """One run of a server, from start to exit code."""

    def __init__(self, config: ServerConfig, model: ModelFiles, owner: OwnerChannel) -> None:
        self._model_seconds = time.monotonic() - STARTED_AT
        self._owner = owner
        self._config = config
        location = {**model.location_flags, "served_model_name": config.model.shown_name}
        hides_status = config.launch.no_status_line or config.launch.log_format == JSON
        self._quiet = hides_status or not terminal.is_foreground()
        has_line = not (self._quiet or config.replicas.has_router)
        self._flags = config.replace(**location, no_status_line=not has_line).to_argv()
        in_cluster = config.replicas.in_cluster
        self._replicas = ClusterReplicas(config) if in_cluster else ReplicaProcesses(config)
        self._supervisor = Supervisor(
            self._flags,
            programs.command_of,
            config.launch,
            no_restart=self._replicas.no_restart,
        )

    def run(self) -> int:
        """Start, serve until a signal or a death for good, stop; return the exit code."""
        try:
            for name in (*self._replicas.processes, FRONTEND):
                self._supervisor.start(name)
            if not self._config.http.no_http:
                self._supervisor.start(GATEWAY)
            return self._wait_until_ready() or self._serve()
        finally:
            self._supervisor.clean_up()

    def _next_event(self, timeout: Countdown | None) -> Death | SupervisorEvent | None:
        """Wait for the next event; None after what only the frontend or the replicas have to know.

        Args:
            timeout: as in `Supervisor.next_event`.
        """
        event = self._supervisor.next_event(timeout)
        match event:
            case ReadyAgain():
                self._supervisor[FRONTEND].send(Command.RESTARTED, event.name)
            case ReplicaChange():
                self._replicas.on_report(event, self._supervisor)
            case _:
                return event
        return None

    # --- start ------------------------------------------------------------------------------------

    def _wait_until_ready(self) -> int:
        """Return EXIT_OK once every process has reported that it serves."""
        timeout = Countdown(self._config.launch.start_timeout)
        line = first_screen.PhaseLine(shown=not self._quiet)
        while self._supervisor.not_ready:
            line.show(self._supervisor, time.monotonic())
            event = self._next_event(timeout)
            match event:
                case Death():
                    if not self._restart(event):
                        return self._fail_start(event.start_error, event.error_code)
                case SupervisorEvent.RESTARTED:
                    self._replicas.report_lost(self._supervisor[FRONTEND])
                case SupervisorEvent.STOP:
                    if not self._owner.is_gone:
                        say("stopped while starting")
                    return EXIT_FORCED
                case SupervisorEvent.TIMEOUT:
                    return self._fail_start(
                        f"{', '.join(self._supervisor.not_ready)} not ready within"
                        f" {self._config.launch.start_timeout:g} s; raise --start-timeout"
                    )
        line.close()
        if self._owner:
            self._owner.report_ready(self._public_endpoint)
        else:
            self._announce()
        return EXIT_OK

    def _fail_start(self, message: str, code: str = ServerFailed.code) -> int:
        """Report why the server cannot start, and return the exit code."""
        report(errors.from_code(code, message), self._owner)
        return EXIT_START_FAILED

    @property
    def _public_endpoint(self) -> str:
        endpoint = self._config.frontend.endpoint
        is_private = endpoint == PRIVATE_ENDPOINT
        return Endpoints(self._supervisor.run_dir).public if is_private else endpoint

    def _announce(self) -> None:
        worker, endpoint = self._supervisor[self._replicas.workers[0]], self._public_endpoint
        if self._config.launch.log_level == "debug":
            for text in first_screen.start_details(self._model_seconds, self._supervisor):
                say(text)
        seconds = time.monotonic() - STARTED_AT
        say(
            first_screen.ready_line(self._config, worker.info, seconds, endpoint),
            **first_screen.ready_fields(self._config, worker.info, seconds, endpoint),
        )
        say(first_screen.start_summary(self._model_seconds, worker))
        if note := self._replicas.cores_note(worker.info):
            say(note)
        has_chat = self._supervisor[FRONTEND].info.get("chat", True)
        for text in first_screen.usage_lines(self._config, has_chat, endpoint):
            say(text)

    # --- serve ------------------------------------------------------------------------------------

    def _serve(self) -> int:
        while True:
            event = self._next_event(None)
            match event:
                case Death():
                    if not self._survives(event):
                        return self._give_up(event)
                case SupervisorEvent.STOP:
                    return self._drain()
                case SupervisorEvent.RESTARTED:
                    self._replicas.report_lost(self._supervisor[FRONTEND])
                case SupervisorEvent.RELOAD:
                    say(f"reloading: {self._replicas.reload_note}")
                    self._replicas.begin_reload()
            self._replicas.reload_next(self._supervisor)

    def _survives(self, death: Death) -> bool:
        """Go on after a death: restart the process, or leave its replica to the others."""
        return self._restart(death) or self._replicas.lose(death, self._supervisor)

    def _restart(self, death: Death) -> bool:
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
        self._replicas.on_restart(death.name, self._supervisor)
        self._supervisor.start_later(death.name, death.restart_delay_s)
        return True

    def _stop_at_once(self) -> int:
        """Stop after a second signal.

        With a journal, clients of the ZeroMQ socket wait for a server that resumes their requests.
        """
        say("second signal: stopped at once")
        self._notify_clients(
            STOPPED_AT_ONCE, (GATEWAY,) if self._config.scheduler.journal else CLIENT_FACING
        )
        return EXIT_FORCED

    def _give_up(self, death: Death) -> int:
        """Report to the clients which process died for good, and stop."""
        message = f"{death.name} died ({death.reason}); all open requests are lost"
        self._notify_clients(f"{message}; the server is stopping, start it again")
        say(
            f"error: {message}. Start the server again; its log above may say why.",
            event="process_died", child=death.name, reason=death.reason, restart_delay_s=None,
        )  # fmt: skip
        return EXIT_CHILD_DIED

    def _notify_clients(self, message: str, names: Iterable[str] = CLIENT_FACING) -> None:
        """Make frontend and gateway, or those of them in `names`, fail open requests and exit."""
        countdown = Countdown(NOTIFY_TIMEOUT_S)
        children = [c for c in self._supervisor if c.name in names and not c.has_exited]
        for child in children:
            child.send(Command.FAIL, message)
        for child in children:
            if not child.exits_within(countdown):
                child.process.kill()

    # --- stop -------------------------------------------------------------------------------------

    def _drain(self) -> int:
        """Finish or, after --shutdown-timeout, abort open requests; return the exit code.

        Without its owner the server has no client any more, and nothing is worth finishing.
        """
        if self._owner.is_gone:
            return EXIT_FORCED
        timeout = self._config.launch.shutdown_timeout
        say(f"stopping: open requests have {timeout:g} s; a second signal ends them now")
        self._supervisor.cancel_start(GATEWAY)
        self._send_drain()
        outcome = self._wait_for_exits(timeout)
        if outcome is None:
            say(f"{timeout:g} s are over: aborting the requests that are left")
            reason = "the server stopped before this request had finished"
            for name in (FRONTEND, *self._replicas.schedulers):
                self._supervisor[name].send(Command.ABORT, reason)
            outcome = self._wait_for_exits(ABORT_TIMEOUT_S)
        if outcome is None:
            say("error: some process did not stop in time and is killed")
            return EXIT_FORCED
        if outcome == EXIT_OK:
            say("stopped")
        return outcome

    def _send_drain(self) -> None:
        client_facing = [child for child in self._supervisor if child.name in CLIENT_FACING]
        for child in (*client_facing, *self._replicas.drained(self._supervisor)):
            child.send(Command.DRAIN)

    def _wait_for_exits(self, timeout: float) -> int | None:
        """Return the exit code once every process has exited or one has failed; None at timeout."""
        countdown, grace = Countdown(timeout), None
        while not self._supervisor.all_exited:
            grace = self._exit_grace(grace)
            event = self._next_event(countdown)
            match event:
                case Death() if event.is_clean or event.name == GATEWAY:
                    continue  # the streams of a gateway that died are broken; no new ones may come
                case Death() if self._all_is_delivered:
                    self._kill_ring()
                case Death():
                    if not self._survives(event):
                        return self._give_up(event)
                case SupervisorEvent.RESTARTED:
                    self._replicas.report_lost(self._supervisor[FRONTEND])
                    self._send_drain()
                case SupervisorEvent.STOP:
                    return self._stop_at_once()
                case SupervisorEvent.TIMEOUT:
                    return None
        return EXIT_OK

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
        names = (FRONTEND, *self._replicas.schedulers)
        children = (self._supervisor[name] for name in names)
        return any(child.has_exited and child.process.returncode == EXIT_OK for child in children)

    def _kill_ring(self) -> None:
        """Kill what waits for a message of a dead process; the gateway may still write."""
        for child in self._supervisor:
            if child.name != GATEWAY and not child.has_exited:
                child.process.kill()


def report(error: QuadrigaError, owner: OwnerChannel) -> None:
    """Report an error to the owner, who raises it, or else print it."""
    if owner:
        owner.report_failure(error.code, str(error))
    else:
        say(f"error: {error}", event="failed", code=error.code)


def fail(error: QuadrigaError, code: int, owner: OwnerChannel) -> NoReturn:
    """Report an error and exit with the code."""
    report(error, owner)
    terminal.drop_unwritten()
    sys.exit(code)


def check_packages(no_http: bool) -> None:
    """Raise ConfigError where a package is not installed that some process imports."""
    packages = SERVING_PACKAGES if no_http else SERVING_PACKAGES + HTTP_PACKAGES
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not installed; {programs.install_command('serve')}"
        )


def serve(arguments: list[str]) -> NoReturn:
    """Run the command `quadriga serve`."""
    main(arguments, "quadriga serve")


def main(arguments: list[str] | None = None, program: str = "launcher.py") -> NoReturn:
    """Parse the flags, find the model, and run a server."""
    terminal.open_if_closed()
    parser = ServerParser(program)
    parser.add_argument("--owner-fd", type=int, help=argparse.SUPPRESS)
    namespace = parser.parse_flags(arguments)
    owner = OwnerChannel(namespace.owner_fd)
    try:
        config = configuration.from_namespace(namespace)
        keys = config.tenants.keys
        if keys and (warning := check_key_file(Path(keys))):
            say(warning)
    except QuadrigaError as error:
        fail(error, EXIT_USAGE, owner)
    if config.launch.log_format == JSON:
        set_up_logging("launcher", "info", JSON)
    try:
        check_packages(config.http.no_http)
        model = find_served_model(config, show_progress=config.launch.log_format != JSON)
        for note in model.notes:
            say(note)
        allow_open_files(MAX_OPEN_FILES)
        code = Launcher(config, model, owner).run()
    except QuadrigaError as error:
        fail(error, EXIT_START_FAILED, owner)
    except KeyboardInterrupt:
        sys.exit(EXIT_FORCED)
    terminal.drop_unwritten()
    sys.exit(code)


if __name__ == "__main__":
    main()
