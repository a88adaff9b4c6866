"""A full disk ends neither the server nor a request."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.server.processes.control_channel import EXIT_OK
from tests.faults.streams import PARAMS, PROMPTS, TIMEOUT_S, ClientLoad
from tests.server import ROOT, Server, kill_tree, running_server, wait_until

# Larger files cannot be written; the journal exceeds it within half a second.
MAX_FILE_BYTES = 8192


def flags(llama_dir: Path) -> list[str]:
    return ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1",
            "--max-total-tokens", "16384", "--max-batch-size", "4"]  # fmt: skip


def fill_the_disk(server: Server) -> None:
    """Limit the file size of the scheduler and of its successors, which inherit the launcher's.

    The limit causes the errors of a full disk, and needs no privileges.
    """
    for pid in (server.process.pid, server.pid_of("scheduler_proc")):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, hard))


def journal_of(server: Server) -> object:
    with Client(server.endpoint, reconnect_timeout=TIMEOUT_S) as client:
        return client.info()["journal"]


def kill_scheduler(server: Server) -> None:
    pid = server.pid_of("scheduler_proc")
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: server.pid_of("scheduler_proc") not in (0, pid), TIMEOUT_S)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outlives", [False, True])
def test_with_the_journal_s_disk_full_every_request_survives_the_death_of_the_scheduler(
    llama_dir: Path, tmp_path: Path, outlives: bool
) -> None:
    options = flags(llama_dir)
    if outlives:
        options += ["--journal", str(tmp_path / "journal")]
    with running_server(tmp_path / "log", *options) as server:
        expected = ClientLoad(server.endpoint).results()
        fill_the_disk(server)
        disturbed = ClientLoad(server.endpoint)
        wait_until(lambda: journal_of(server) == "failed", TIMEOUT_S)
        assert disturbed.started.wait(TIMEOUT_S)
        for _ in range(2):
            assert disturbed.is_alive()
            kill_scheduler(server)
        assert disturbed.results() == expected
        log = (tmp_path / "log").read_text()
    assert "cannot be written ([Errno 27] File too large)" in log
    assert "Traceback" not in log


@pytest.mark.timeout(60)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("log", ["/dev/full", "pipe", "closed"])
def test_a_log_that_takes_nothing_ends_neither_the_server_nor_changes_its_exit_code(
    llama_dir: Path, log: str
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    command = [sys.executable, str(ROOT / "launcher.py"), "--endpoint", endpoint, "--no-http"]
    command += flags(llama_dir)
    if log == "closed":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    reading, writing = os.pipe()
    os.close(reading)
    output = writing if log == "pipe" else os.open("/dev/full", os.O_WRONLY)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=output, start_new_session=True
    )
    os.close(writing)
    if output != writing:
        os.close(output)
    try:
        with Client(endpoint, connect_timeout=TIMEOUT_S) as client:
            before = client.generate(PROMPTS[0], PARAMS[0]).token_ids
            children = psutil.Process(process.pid).children()
            next(child for child in children if "scheduler_proc" in child.cmdline()).kill()
            assert client.generate(PROMPTS[0], PARAMS[0]).token_ids == before
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == EXIT_OK
        assert not any(child.is_running() for child in children)
    finally:
        kill_tree(process)
