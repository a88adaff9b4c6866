"""Without restarts every client gets an error when a process dies, and nothing is left behind."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.client.server import free_port
from quadriga.client import Client, SamplingParams
from quadriga.errors import QuadrigaError, ServerFailed, ServerStopping, ServerUnreachable
from quadriga.server.processes.control_channel import EXIT_CHILD_DIED, EXIT_FORCED, EXIT_OK
from tests.everything import more
from tests.server import Server, running_server, stop, wait_until

LONG = SamplingParams(temperature=0, max_new_tokens=240, ignore_eos=True)
CLIENTS = 4
STREAMS = 4


class BusyClients:
    """Clients that keep many requests open, and record their errors."""

    def __init__(self, endpoint: str, reconnect_timeout: float = 1.0) -> None:
        self.errors: list[QuadrigaError] = []
        self.finished = 0
        self.started = threading.Barrier(CLIENTS + 1)
        self._endpoint, self._reconnect_timeout = endpoint, reconnect_timeout
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        self.started.wait(30)

    def _run(self) -> None:
        with Client(self._endpoint, reconnect_timeout=self._reconnect_timeout) as client:
            first = client.stream([5, 6, 7], LONG)
            next(first)
            self.started.wait(30)
            try:
                while True:
                    client.generate([[n + 3] * 9 for n in range(STREAMS)], LONG)
                    self.finished += STREAMS
            except QuadrigaError as error:
                self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive(), "a client hangs"


@pytest.fixture
def own_server(llama_dir: Path, tmp_path: Path) -> Iterator[Server]:
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--max-restarts", "0", "--shutdown-timeout", "600"]
    with running_server(tmp_path / "log", *flags) as server:
        yield server


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("worker_proc", signal.SIGKILL),
        ("worker_proc", signal.SIGSEGV),
        ("scheduler_proc", signal.SIGKILL),
        ("detok_proc", signal.SIGKILL),
        ("tokenizer_proc", signal.SIGKILL),
        more("scheduler_proc", signal.SIGSEGV),
        more("detok_proc", signal.SIGSEGV),
        more("tokenizer_proc", signal.SIGSEGV),
    ],
)
def test_a_child_that_dies_under_load_is_named_to_every_client(
    own_server: Server, name: str, number: signal.Signals
) -> None:
    # Only the frontend's death has to be found out: of others the clients are notified.
    is_frontend = name == "tokenizer_proc"
    clients = BusyClients(own_server.endpoint, reconnect_timeout=1.0 if is_frontend else 600.0)
    os.kill(own_server.pids[name], number)
    assert own_server.process.wait(10) == EXIT_CHILD_DIED
    clients.join()
    assert len(clients.errors) == CLIENTS
    expected = ServerUnreachable if is_frontend else ServerFailed
    for error in clients.errors:
        assert isinstance(error, expected)
        assert name.replace("_proc", "") in str(error)
    log = own_server.log.read_text()
    assert f"{name} died (killed by {number.name})" in log
    own_server.wait_for_nothing_left()


def test_a_killed_launcher_leaves_no_process_and_no_socket_file(own_server: Server) -> None:
    clients = BusyClients(own_server.endpoint)
    own_server.process.kill()
    own_server.process.wait(5)
    own_server.wait_for_nothing_left(2.0)
    clients.join()
    assert len(clients.errors) == CLIENTS


def test_a_stop_signal_lets_running_requests_finish_and_refuses_new_ones(
    own_server: Server,
) -> None:
    with Client(own_server.endpoint, reconnect_timeout=1.0) as client:
        stream = client.stream([5, 6, 7], LONG)
        chunks = [next(stream)]
        own_server.process.send_signal(signal.SIGINT)
        wait_until(lambda: "stopping" in own_server.log.read_text(), 5)
        error = wait_until(lambda: error_of(client), 10)
        assert isinstance(error, (ServerStopping, ServerUnreachable))
        chunks += stream
    assert chunks[-1].completion is not None
    assert len(chunks[-1].completion.token_ids) == 240
    assert own_server.process.wait(10) == EXIT_OK
    own_server.wait_for_nothing_left()


def test_requests_unfinished_after_the_shutdown_timeout_are_aborted_with_a_reason(
    llama_dir: Path, tmp_path: Path
) -> None:
    flags = ["--model", str(llama_dir), "--worker-threads", "1", "--shutdown-timeout", "0"]
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        stream = client.stream([5, 6, 7], LONG)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(ServerStopping, match="stopped before this request had finished"):
            list(stream)
        assert server.process.wait(10) == EXIT_OK


def test_a_second_signal_stops_at_once(own_server: Server) -> None:
    clients = BusyClients(own_server.endpoint)
    os.kill(own_server.pids["worker_proc"], signal.SIGSTOP)  # so that nothing can finish
    own_server.process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping" in own_server.log.read_text(), 5)
    own_server.process.send_signal(signal.SIGINT)
    assert own_server.process.wait(5) == EXIT_FORCED
    own_server.wait_for_nothing_left()
    clients.join()
    # "is stopping" where a slow machine had not accepted the request before the first signal
    assert all("stop" in str(error) for error in clients.errors), clients.errors


def test_a_client_goes_on_when_a_new_server_is_there(llama_dir: Path, tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    flags = ["--model", str(llama_dir), "--worker-threads", "1", "--max-total-tokens", "1024"]
    with running_server(tmp_path / "first", *flags, endpoint=endpoint) as server:
        client = Client(endpoint, reconnect_timeout=1.0)
        assert error_of(client) is None
        server.process.kill()
        server.process.wait()
        wait_until(lambda: isinstance(error_of(client), (ServerFailed, ServerUnreachable)), 5)
    with running_server(tmp_path / "second", *flags, endpoint=endpoint):
        wait_until(lambda: error_of(client) is None, 5)
        client.close()


def error_of(client: Client) -> QuadrigaError | None:
    try:
        client.generate([5], SamplingParams(max_new_tokens=1))
    except QuadrigaError as error:
        return error
    return None


def test_a_worker_that_was_stopped_does_not_hold_up_the_stop(own_server: Server) -> None:
    os.kill(own_server.pids["worker_proc"], signal.SIGSTOP)
    assert stop(own_server.process) == EXIT_OK
    assert own_server.log.read_text().rstrip().endswith("stopped")
