"""Servers and checkpoints that several tests share."""

import atexit
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway import running_gateway
from tests.server import Server, running_server
from tests.tiny_models import tiny_gpt2, tiny_llama


def _silence_bindings() -> None:
    """Close stderr at exit, where Triton's bindings print a hundred lines about leaked objects."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


atexit.register(_silence_bindings)  # the first function that is registered runs last


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
