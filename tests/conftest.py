"""Servers and checkpoints that several tests share, and the markers of each directory."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import PROGRAMS, find_chromium, running_chromium
from tests.cpu_shares import all_cpus
from tests.gateway import running_gateway
from tests.server import Server, running_server

TESTS = Path(__file__).parent
MARKERS = {
    "integration": ["slow"],
    "cluster": ["slow"],
    "faults": ["slow", "faults"],
    "gpu": ["slow", "gpu"],
}
"""The markers of the tests in each directory below this one."""
MINUTES_S = 600
"""Tests with a time limit of so many seconds or more run for minutes."""

# A shell starts background jobs with SIGINT ignored, and programs under test would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules that are imported while tests are collected stay: the garbage collector skips them.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test as its directory says, and put those that run for minutes first.

    In a parallel run a long test at the end would have one core to itself, and the others idle.
    """
    for item in items:
        for name in MARKERS.get(item.path.relative_to(TESTS).parts[0], []):
            item.add_marker(name)
    items.sort(key=_runs_for_minutes, reverse=True)


def _runs_for_minutes(item: pytest.Item) -> bool:
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] >= MINUTES_S


def pytest_collection_finish() -> None:
    """Let the garbage collector search only the objects that the tests themselves make."""
    gc.freeze()
    gc.enable()


def _silence_bindings() -> None:
    """Close stderr at exit, where Triton's bindings print a hundred lines about leaked objects."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_silence_bindings)  # the first function that is registered runs last


@pytest.fixture
def every_cpu() -> Iterator[None]:
    """All CPUs, also in a parallel run: for tests whose threads have to run at the same time."""
    with all_cpus():
        yield


@pytest.fixture(scope="session")
def chromium() -> Iterator[str]:
    """Yield the address of a running browser."""
    program = find_chromium()
    if program is None:
        pytest.skip(f"no browser: install one of {', '.join(PROGRAMS)} (Debian: chromium)")
    with running_chromium(program) as address:
        yield address


# Importing tests.tiny_models loads torch and transformers, which many tests do without.


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny_models import tiny_gpt2

    return tiny_gpt2(tmp_path_factory.mktemp("tiny-gpt2"))


@pytest.fixture(scope="session")
def server(llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a float32 server of the tiny Llama that tests share and must not break."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ["--model", str(llama_dir), "--dtype", "float32", "--worker-threads", "1"]
    flags += ["--max-total-tokens", "8192", "--max-batch-size", "16"]
    with running_server(log, *flags) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(server: Server, llama_dir: Path) -> Iterator[str]:
    """Start a gateway of the shared server, whose model is `tiny`, and return its URL."""
    with running_gateway(server.endpoint, llama_dir) as url:
        yield url
