"""Ranks find each other by a file or by a port, on the interface of their machine's address."""

from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from quadriga.errors import ConfigError
from worker_proc.distributed.rendezvous import (
    FileRendezvous,
    PortRendezvous,
    interface_of,
    rendezvous_at,
)
from worker_proc.loading.sharding import TPRank

LOOPBACK = "127.0.0.1"


def test_a_rank_on_the_machine_of_rank_0_finds_the_same_place(tmp_path: Path) -> None:
    file = FileRendezvous(tmp_path / "ranks")
    assert rendezvous_at(file.address).address == str(tmp_path / "ranks")
    assert isinstance(rendezvous_at(file.address), FileRendezvous)
    assert isinstance(rendezvous_at("tcp://10.0.0.7:1234"), PortRendezvous)


def test_a_port_is_open_on_the_address_of_the_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    meeting = PortRendezvous.open(LOOPBACK)
    port = int(meeting.address.rpartition(":")[2])
    timeout = timedelta(seconds=20)
    ours = meeting.begin(TPRank(0, 1), timeout)["store"]
    theirs = rendezvous_at(meeting.address).begin(TPRank(1, 1), timeout)["store"]
    ours.set("key", "value")
    assert theirs.get("key") == b"value"
    listening = [
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]
    assert listening == [LOOPBACK]


def test_an_address_that_no_interface_has_is_an_error_with_the_remedy() -> None:
    assert psutil.net_if_addrs()[interface_of(LOOPBACK)]
    with pytest.raises(ConfigError, match=r"has the address 203\.0\.113\.9, .*--node-ip-address"):
        interface_of("203.0.113.9")
