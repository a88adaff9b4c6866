"""A crew of two processes that only wait, for the tests of what every crew does.

python -m tests.unit.cluster.small_crew CONTROL_FD KEYS
"""

import socket
import sys
from pathlib import Path

from cluster_proc.crew import KeptProcesses
from quadriga.errors import ConfigError
from quadriga.server.config.server_config import LaunchArgs
from quadriga.server.processes.supervisor import Death, SupervisorEvent

# Waits for commands until the crew has gone.
WAITING_PROCESS = """
import socket, sys
control = socket.socket(fileno=int(sys.argv[sys.argv.index("--control-fd") + 1]))
while control.recv(100):
    pass
"""
RIGHT_KEYS = "the server's"


class SmallCrew(KeptProcesses):
    """Reports what it has started, also where that fails, each restart, and the last death."""

    def _start(self) -> None:
        try:
            super()._start()
        finally:
            self._report("started")

    def _report(self, kind: str) -> None:
        pids = [child.process.pid for child in self._supervisor]
        self._control.report(kind, pids=pids, run_dir=str(self._supervisor.run_dir))

    def _handle(self, event: object) -> None:
        if event is SupervisorEvent.RESTARTED:
            self._report("restarted")

    def _survives(self, death: Death) -> bool:
        if death.restart_delay_s is None:
            self._control.report("lost", reason=death.reason)
            return False
        self._check_keys()
        self._supervisor.start_later(death.name, death.restart_delay_s)
        return True


def main() -> None:
    control_fd, keys = int(sys.argv[1]), Path(sys.argv[2])

    def check_keys() -> None:
        if keys.read_text() != RIGHT_KEYS:
            raise ConfigError("these are other keys")

    crew = SmallCrew(
        ["first", "second"],
        [],
        lambda _: [sys.executable, "-c", WAITING_PROCESS],
        LaunchArgs(max_restarts=1),
        [],
        check_keys,
        socket.socket(fileno=control_fd),
    )
    try:
        sys.exit(crew.run())
    except ConfigError:
        sys.exit(3)


if __name__ == "__main__":
    main()
