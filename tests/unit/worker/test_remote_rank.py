"""A rank on another machine joins no rank 0 of another version."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quadriga import __version__
from quadriga.errors import ConfigError
from quadriga.wire.links import Endpoints, NodeLinks, ReservedPort
from quadriga.wire.sockets import Outbox
from quadriga.wire.worker import JoinRanks, StopWorker
from worker_proc.tp_rank import wait_for_rank_0


@pytest.mark.parametrize(("version", "shown"), [("9.9.9", "9.9.9"), ("", "of an older version")])
def test_a_rank_zero_of_another_version_is_refused_by_name(
    tmp_path: Path, version: str, shown: str
) -> None:
    port = ReservedPort("127.0.0.1")
    links = NodeLinks(ranks=("", port.address))
    child = SimpleNamespace(endpoints=Endpoints(tmp_path, links))
    rank_zero = Outbox(port.address, links.prepare_connect)
    rank_zero.send(StopWorker())  # of a rank 0 before this one
    rank_zero.send(JoinRanks("tcp://10.0.0.7:1", "tcp://10.0.0.7:2", version))
    with pytest.raises(ConfigError) as refused:
        wait_for_rank_0(cast("Any", child), 1)
    assert str(refused.value) == (
        f"rank 0 at tcp://10.0.0.7:2 runs quadriga {shown}, and this machine {__version__}:"
        " install the same version on all machines"
    )
    rank_zero.close()
    port.close()
