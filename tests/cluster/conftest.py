"""A Ray cluster of three machines, all of them this one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quadriga.wire.curve import make_server_keys

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
