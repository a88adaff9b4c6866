"""Servers of the bench's own, which live as long as the bench."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from quadriga.config.server_config import ServerConfig
from quadriga.errors import DeadlineExceeded, ServerFailed, ServerUnreachable
from quadriga.runtime.parent_death import signal_at_parents_death

if TYPE_CHECKING:
    from typing_extensions import Self

LAUNCHER = Path(__file__).resolve().parents[2] / "launcher.py"
STOP_SECONDS = 15.0
"""How long each signal may take before the next, harder one. Seconds."""
CHILDREN_SECONDS = 3.0
LOG_LINES = 20
RETRY_SECONDS = 0.1

Attempt = Callable[[], Awaitable[dict[str, Any]]]
"""Asks the server for its info; ServerUnreachable or DeadlineExceeded while it cannot answer."""


class ServerProcess:
    """A server that starts on entering and is gone after leaving, with all of its processes.

    It has a session of its own, so that a Ctrl-C at the terminal reaches only the bench, which
    then stops it in order. log: a file, or None for our standard error. environment: variables
    beside ours. start_timeout: seconds that wait_ready waits.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None = None,
        start_timeout: float = 600.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._log_path = log
        self._start_timeout = start_timeout
        self._environment = {**os.environ, **(environment or {})}
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Self":
        if self._log_path is not None:
            self._log = self._log_path.open("wb")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._log or sys.stderr.fileno(),
            stderr=self._log or sys.stderr.fileno(),
            env=self._environment,
            start_new_session=True,
            preexec_fn=partial(signal_at_parents_death, signal.SIGTERM),
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._stop()
        finally:
            if self._log is not None:
                self._log.close()

    async def wait_ready(self, attempt: Attempt) -> dict[str, Any]:
        """The info of the server, as soon as it answers.

        ServerFailed where it ends before, or is not ready within its start_timeout.
        """
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            self.check()
            with suppress(ServerUnreachable, DeadlineExceeded):
                info = await attempt()
                if info.get("ready", True):
                    return info
            await asyncio.sleep(RETRY_SECONDS)
        raise ServerFailed(
            f"the server is not ready after {self._start_timeout:g} s{self._last_lines()}"
        )

    def check(self) -> None:
        """ServerFailed with the last lines of the log if the server has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServerFailed(f"the server ended with exit code {code}{self._last_lines()}")

    def pause(self) -> None:
        """None of its processes runs until `resume`: an idle loop of it takes nothing."""
        assert self._process is not None
        _signal_group(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        assert self._process is not None
        _signal_group(self._process.pid, signal.SIGCONT)

    def _stop(self) -> None:
        """SIGINT lets it finish, a second signal forces it, and the third cannot be refused.

        Its children leave when it is gone, and are given the time to clean up.
        """
        assert self._process is not None
        self.resume()
        for number in (signal.SIGINT, signal.SIGTERM):
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + CHILDREN_SECONDS
        while _signal_group(self._process.pid, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        _signal_group(self._process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        if self._log_path is None:
            return "; its log is above"
        lines = self._log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return f"; the end of {self._log_path}:\n" + "\n".join(f"  {line}" for line in lines)


class OwnServer(ServerProcess):
    """A `python launcher.py` at a free endpoint. config: its flags, but for that. http_port: of its
    web gateway; None: it has none."""

    def __init__(
        self,
        config: ServerConfig,
        log: Path | None = None,
        launcher: Path = LAUNCHER,
        http_port: int | None = None,
    ) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        config = config.replace(endpoint=self.endpoint, no_http=http_port is None)
        if http_port is not None:
            config = config.replace(port=http_port)
        command = [sys.executable, str(launcher), *config.to_argv()]
        super().__init__(command, log, config.launch.start_timeout)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(group: int, number: int) -> bool:
    """False if nobody is left in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
