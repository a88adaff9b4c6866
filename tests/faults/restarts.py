"""A server whose processes all die or stand still at once, and that is resumed."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.server import Server, kill_tree, launch, stop, wait_until_ready

# For so long the whole server stands still.
STOPPED_S = 2.0


class Restarts:
    """A server with a journal, and those that resume it.

    Args:
        environment: variables of each server, in addition to those of this process.

    Attributes:
        server: the one that runs.
    """

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        flags: list[str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._endpoint = endpoint
        self._flags = flags
        self._environment = environment
        self._number = 0
        self._start()

    def _start(self, *flags: str) -> None:
        self._number += 1
        log = self._directory / f"resumed-{self._endpoint.rpartition(':')[2]}-{self._number}"
        process = launch(
            self._endpoint, *self._flags, *flags, log=log, environment=self._environment
        )
        self.server = Server(process, self._endpoint, log, self._directory, {})
        wait_until_ready(process, log)

    def disturb_all(self, number: int, when_dead: Callable[[], None] = lambda: None) -> None:
        """Send a signal to every process, and let the streams go on afterwards.

        Args:
            number: of the signal.
            when_dead: called before the next server starts.
        """
        launcher = self.server.process.pid
        pids = [launcher, *(child.pid for child in psutil.Process(launcher).children())]
        for pid in pids:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(STOPPED_S)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        else:
            self.server.process.wait()
            when_dead()
            self._start("--resume")


@contextmanager
def resumed_server(
    directory: Path, endpoint: str, flags: list[str], environment: Mapping[str, str] | None = None
) -> Iterator[Restarts]:
    """Run a server that may be started again, and stop the last one."""
    servers = Restarts(directory, endpoint, flags, environment)
    try:
        yield servers
        stop(servers.server.process)
    finally:
        kill_tree(servers.server.process)
