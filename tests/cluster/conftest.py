"""A Ray cluster of three machines, all of them this one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.wire.curve import make_server_keys
from tests.cluster.cluster_server import MODEL_FLAGS, run_streams
from tests.server import running_server

MACHINE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Yield the cluster; its address is at `address`."""
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**MACHINE, "include_dashboard": False})
    cluster.add_node(**MACHINE)
    cluster.add_node(**MACHINE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="session")
def key_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_server_keys(directory)
    return directory


@pytest.fixture(scope="session")
def undisturbed(
    ray_cluster: Any, llama_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[str, ...]]:
    """Return the answers of one server of one process."""
    log = tmp_path_factory.mktemp("one") / "log"
    with running_server(log, "--model", str(llama_dir), *MODEL_FLAGS) as server:
        return asyncio.run(run_streams(server.endpoint, asyncio.Event()))
