"""Servers whose replicas have roles, and compute every prompt apart."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.server.processes.run_dir import shared_dir
from tests.faults.inject import ALL_APART, fault_environment
from tests.server import Server, running_server, settle, wait_until

FLAGS = ["--worker-threads", "1", "--page-size", "4", "--max-total-tokens", "4096"]
ROLES = [*FLAGS, "--dp", "2", "--prefill-replicas", "1", "--max-restarts", "1000"]
RESTART_TIMEOUT_S = 60.0


@contextmanager
def served(
    log: Path, model: Path, *flags: str, faults: str = ALL_APART, dtype: str = "float32"
) -> Iterator[Server]:
    flags = ("--model", str(model), "--dtype", dtype, *flags)
    with running_server(log, *flags, environment=fault_environment(faults)) as server:
        yield server
    assert not shared_dir(server.run_dir).exists(), "pages are left in shared memory"


def facts(server: Server) -> Mapping[str, Any]:
    """Return the info of a server at rest, whose pages are all given back."""
    info = settle(server.endpoint, RESTART_TIMEOUT_S)
    assert info["pages_held"] == 0
    return info


def restart(server: Server, name: str, number: int) -> None:
    """Kill a process, and wait until it is back."""
    before = server.pid_of(name)
    os.kill(before, number)
    wait_until_back(server, name, before)


def wait_until_back(server: Server, name: str, before: int) -> None:
    wait_until(lambda: server.pid_of(name) not in (0, before), RESTART_TIMEOUT_S)
    server.pids[name] = server.pid_of(name)
