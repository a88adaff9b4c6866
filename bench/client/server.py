"""Start servers for the bench, stop them when the bench ends, and connect to what is measured."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bench.client.backends import OpenAIServer, ServerConnection
from quadriga.client import AsyncClient
from quadriga.errors import ConfigError, DeadlineExceeded, ServerFailed, ServerUnreachable
from quadriga.programs import install_command
from quadriga.server.config import server_config
from quadriga.server.config.parser import CommandParser
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes.control_channel import signal_at_parents_death

if TYPE_CHECKING:
    from typing_extensions import Self


LAUNCHER = Path(__file__).resolve().parents[2] / "launcher.py"
STOP_TIMEOUT_S = 15.0  # after each signal
CHILDREN_TIMEOUT_S = 3.0
MAX_SHOWN_LINES = 20
RETRY_INTERVAL_S = 0.1

# Asks a server for its info; raises ServerUnreachable or DeadlineExceeded if it does not answer.
Attempt = Callable[[], Awaitable[dict[str, Any]]]


class ServerProcess:
    """A server that starts on entering and is stopped, with all its processes, on leaving.

    It has a session of its own, so that a Ctrl-C at the terminal reaches only the bench, which
    then stops the server in order. Without a `log` file its output goes to standard error.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None,
        start_timeout: float,
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

    def __exit__(self, *_: object) -> None:
        try:
            self._stop()
        finally:
            if self._log is not None:
                self._log.close()

    async def wait_ready(self, attempt: Attempt) -> dict[str, Any]:
        """Return the info of the server as soon as it is ready, or raise ServerFailed."""
        deadline = time.monotonic() + self._start_timeout
        while time.monotonic() < deadline:
            self.check()
            with suppress(ServerUnreachable, DeadlineExceeded):
                info = await attempt()
                if info.get("ready", True):
                    return info
            await asyncio.sleep(RETRY_INTERVAL_S)
        raise ServerFailed(
            f"the server is not ready after {self._start_timeout:g} s{self._last_lines()}"
        )

    def check(self) -> None:
        """Raise ServerFailed with the last lines of the log if the server has ended."""
        assert self._process is not None
        code = self._process.poll()
        if code is not None:
            raise ServerFailed(f"the server ended with exit code {code}{self._last_lines()}")

    def pause(self) -> None:
        """Stop all processes of the server (SIGSTOP) until `resume`, so that they use no CPU."""
        assert self._process is not None
        _signal_group(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """End a pause."""
        assert self._process is not None
        _signal_group(self._process.pid, signal.SIGCONT)

    def _stop(self) -> None:
        """Send SIGINT, then SIGTERM, then SIGKILL.

        The children leave when the server is gone, and get CHILDREN_TIMEOUT_S to clean up.
        """
        assert self._process is not None
        self.resume()
        for number in (signal.SIGINT, signal.SIGTERM):
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + CHILDREN_TIMEOUT_S
        while _signal_group(self._process.pid, 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        _signal_group(self._process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        if self._log_path is None:
            return "; its log is above"
        lines = self._log_path.read_text(errors="replace").splitlines()[-MAX_SHOWN_LINES:]
        return f"; the end of {self._log_path}:\n" + "\n".join(f"  {line}" for line in lines)


class OwnServer(ServerProcess):
    """A `python launcher.py` at a free endpoint, with a gateway if `http_port` is given."""

    def __init__(
        self,
        config: ServerConfig,
        log: Path | None,
        launcher: Path = LAUNCHER,
        http_port: int | None = None,
    ) -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        config = config.replace(endpoint=self.endpoint, no_http=http_port is None)
        if http_port is not None:
            config = config.replace(port=http_port)
        self._curve_dir = config.frontend.curve_dir
        command = [sys.executable, str(launcher), *config.to_argv()]
        super().__init__(command, log, config.launch.start_timeout)

    async def wait_info(self) -> dict[str, Any]:
        """Return the info of the server as soon as it is ready, or raise ServerFailed."""
        limits = START_CONNECT_TIMEOUT_S, START_INFO_TIMEOUT_S
        return await self.wait_ready(lambda: info_of(self.endpoint, self._curve_dir, *limits))


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; return False if the group has no process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


# These two hold for each attempt while the bench's own server starts.
START_CONNECT_TIMEOUT_S = 1.0
START_INFO_TIMEOUT_S = 2.0


def connection(
    server: str | OpenAIServer, connect_timeout: float, curve_dir: str
) -> AbstractAsyncContextManager[ServerConnection]:
    """Return a connection that opens on entering; `server` may be an endpoint of Quadriga.

    Raises ConfigError if a package that the connection needs is not installed.
    """
    if isinstance(server, str):
        return AsyncClient(server, connect_timeout, curve_dir=curve_dir)
    try:
        from bench.client.openai_client import OpenAIClient
    except ImportError as error:
        raise ConfigError(
            f"--backend openai needs {error.name}, which is not installed:"
            f" {install_command('bench')}"
        ) from None
    return OpenAIClient(server, connect_timeout)


async def info_of(
    server: str | OpenAIServer, curve_dir: str, connect_timeout: float, info_timeout: float
) -> dict[str, Any]:
    """Return a server's info, or raise ServerUnreachable or DeadlineExceeded."""
    async with connection(server, connect_timeout, curve_dir) as client:
        return await client.info(info_timeout)


async def start_server(
    config: ServerConfig, log: Path | None, stack: AsyncExitStack, launcher: Path = LAUNCHER
) -> tuple[str, dict[str, Any]]:
    """Start a server, which the stack stops; return its endpoint and info once it serves."""
    server = stack.enter_context(OwnServer(config, log, launcher))
    return server.endpoint, await server.wait_info()


def config_of(flags: Sequence[str], server: str = "the server") -> ServerConfig:
    """Return the configuration that flags give a server, which errors call `server`."""
    parser = CommandParser(server, allow_abbrev=False)
    server_config.add_flags(parser)
    return server_config.from_namespace(parser.parse_args(list(flags)))


@asynccontextmanager
async def serving(
    flags: Sequence[str], http_port: int | None = None
) -> AsyncIterator[tuple[OwnServer, dict[str, Any]]]:
    """Serve with these flags as long as the context lasts; give the server and its info.

    The log is in a temporary file, whose end is part of the error if the server does not start.

    Args:
        flags: of the server.
        http_port: of its gateway; None: without one.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        OwnServer(config_of(flags), Path(directory) / "log", http_port=http_port) as server,
    ):
        yield server, await server.wait_info()
