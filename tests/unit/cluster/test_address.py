"""An address at which no Ray cluster can be."""

import socket

import pytest

from cluster_proc.crews import check_port


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_a_port_at_which_nothing_listens_is_refused_at_once(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_port(f"{scheme}127.0.0.1:{port}")
    with pytest.raises(ConnectionRefusedError):
        check_port(f"{scheme}127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["auto", "local"])
def test_an_address_without_a_port_is_left_to_ray(address: str) -> None:
    check_port(address)
