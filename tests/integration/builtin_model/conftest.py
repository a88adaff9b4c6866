"""One server of the built-in model, and a gateway, for all tests that read what it says."""

from collections.abc import Iterator

import openai
import pytest

from quadriga.server.config.engine_args import BUILTIN_MODEL
from tests.gateway import running_gateway
from tests.server import Server, running_server


@pytest.fixture(scope="session")
def builtin_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("builtin") / "log"
    flags = ["--model", BUILTIN_MODEL, "--dtype", "float32", "--max-total-tokens", "8192"]
    with running_server(log, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def url(builtin_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a gateway that stores responses, and return the URL of OpenAI's API."""
    data = ["--data-dir", str(tmp_path_factory.mktemp("data"))]
    with running_gateway(builtin_server.endpoint, BUILTIN_MODEL, *data) as address:
        yield f"{address}/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client
