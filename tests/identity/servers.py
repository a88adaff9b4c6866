"""Start the servers of a recording, send them requests, and wait for their states."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.identity.http_requests import FILLER, SERVERS, Call, Plan
from tests.identity.model import write_model

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 90.0, 60.0, 30.0
POLL_S = 0.01
REPORT_S = 0.3  # for the report of a queue's length to the process that refuses requests


class Server(NamedTuple):
    """A running server.

    Attributes:
        hidden: texts that differ between two runs, and what stands for them.
        headers: of the questions whether it is idle.
    """

    process: "subprocess.Popen[bytes]"
    port: int
    hidden: dict[str, str]
    headers: dict[str, str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Servers:
    """The servers of SERVERS, each of which is started when it is first needed.

    Args:
        directory: of their files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, Server] = {}

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self._running]:
            self.stop(name)

    def running(self, name: str) -> Server:
        """Return a server, and start it if it does not run."""
        if name not in self._running:
            home, plan = self._directory / name, SERVERS[name]
            write_model(home / "model", plan.answers, plan.chats)
            for file, text in plan.files.items():
                (home / file).write_text(text)
                (home / file).chmod(0o600)
            self._running[name] = _start(home, plan)
            _wait_until_ready(self._running[name], home / "log")
        return self._running[name]

    def stop(self, name: str) -> None:
        """Stop a server that runs."""
        process = self._running.pop(name).process
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(home: Path, plan: Plan) -> Server:
    port, endpoint = free_port(), free_port()
    command = [sys.executable, str(ROOT / "launcher.py"), "--model", str(home / "model")]
    command += ["--endpoint", f"tcp://127.0.0.1:{endpoint}", "--port", str(port)]
    command += [flag.replace("$home", str(home)) for flag in plan.flags]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    hidden = {str(home): "<home>", f":{port}": ":<port>", f":{endpoint}": ":<endpoint>"}
    return Server(process, port, hidden, plan.headers)


def _wait_until_ready(server: Server, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "quadriga ready" not in log.read_text():
        if server.process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.05)


# --- requests -------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """An answer as it came. `is_cut`: the client left before its end."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes
    is_cut: bool = False

    def header(self, name: str) -> str:
        """Return the value of a header, or "" without it."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), "")

    @property
    def kind(self) -> str:
        """The media type."""
        return self.header("Content-Type").partition(";")[0]


def send(server: Server, call: Call) -> Answer:
    """Send a call whose body is in bytes, and return the answer."""
    if call.raw is not None:
        return _send_raw(server, call.raw)
    method, path = call.target.split(" ", 1)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_TIMEOUT_S)
    try:
        headers = {**call.headers}
        names = {name.lower() for name in headers}
        connection.putrequest(method, path, skip_host="host" in names, skip_accept_encoding=True)
        if call.body is not None and not names & {"content-length", "transfer-encoding"}:
            headers["Content-Length"] = str(len(call.body))
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders(call.body)
        response = connection.getresponse()
        status = f"{response.status} {response.reason}"
        if call.leave_after is None:
            return Answer(status, response.getheaders(), response.read())
        body = b""
        while body.count(b"\n\n") < call.leave_after and (line := response.readline()):
            body += line
        return Answer(status, response.getheaders(), body, is_cut=True)
    finally:
        connection.close()


def _send_raw(server: Server, data: bytes) -> Answer:
    """Send bytes that may be no HTTP."""
    with socket.create_connection(("127.0.0.1", server.port), ANSWER_TIMEOUT_S) as connection:
        connection.sendall(data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        status = f"{response.status} {response.reason}"
        return Answer(status, response.getheaders(), response.read())


# --- states ---------------------------------------------------------------------------------------


def info(server: Server) -> Any:
    """Return what /server_info answers."""
    call = Call("", "GET /server_info", headers=server.headers)
    return json.loads(send(server, call).body)


def wait_until(server: Server, is_met: Callable[[Any], bool], reason: str) -> None:
    """Wait until /server_info of a server meets a condition. `reason`: for the error message."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not is_met(info(server)):
        if time.monotonic() > deadline:
            sys.exit(f"{reason}: the server does not get there: {info(server)}")
        time.sleep(POLL_S)


def settle(server: Server) -> None:
    """Wait until no request is open and no page is held, so that the cache is always the same."""

    def is_idle(found: Any) -> bool:
        parts = [found, *(found.get("replicas") or [])]
        names = ("running", "waiting", "pages_held", "open_requests")
        return not any(part.get(name) for part in parts for name in names)

    wait_until(server, is_idle, "settle")


@contextlib.contextmanager
def fillers(server: Server, sizes: tuple[int, ...]) -> Iterator[None]:
    """Keep a server busy with long streams of so many choices, so that what comes next waits."""
    with contextlib.ExitStack() as stack:
        for num_choices in sizes:
            stack.callback(_fill(server, num_choices).close)
            time.sleep(REPORT_S)
        yield


def _fill(server: Server, num_choices: int) -> http.client.HTTPConnection:
    wanted = num_open(info(server)) + num_choices
    body = json.dumps({**FILLER, "n": num_choices})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_TIMEOUT_S)
    connection.request("POST", "/v1/completions", body, server.headers)
    wait_until(server, lambda found: found["running"] > 0 and num_open(found) >= wanted, "filler")
    return connection


def num_open(found: Any) -> int:
    return int(found["running"] + found["waiting"])
