"""A client that has several addresses uses one that answers."""

import pytest

from bench.client.server import free_port
from quadriga.client import Client
from quadriga.errors import ConfigError, ServerUnreachable
from tests.unit.fake_server import running_fake_server

NOWHERE = "tcp://127.0.0.1:{}"


def test_it_uses_the_first_one_that_answers() -> None:
    with running_fake_server() as server:
        endpoints = f"{NOWHERE.format(free_port())}, {server.endpoint}"
        with Client(endpoints, connect_timeout=20) as client:
            assert client.generate("one").text == "ab"


def test_it_goes_to_the_next_one_when_its_server_is_gone() -> None:
    with (
        running_fake_server() as first,
        running_fake_server() as second,
        Client(f"{first.endpoint},{second.endpoint}", connect_timeout=20) as client,
    ):
        assert client.generate("one").text == "ab"
        assert second.requests == []
        first.stopping = True
        first.join()
        assert client.generate("two", timeout=30).text == "ab"
        assert len(second.requests) == 1


def test_an_error_names_all_of_them() -> None:
    endpoints = ",".join(NOWHERE.format(free_port()) for _ in range(2))
    with pytest.raises(ServerUnreachable, match=endpoints):
        Client(endpoints, connect_timeout=0.1).__enter__()


def test_a_web_address_among_them_is_refused() -> None:
    with pytest.raises(ConfigError, match="web address"):
        Client("tcp://127.0.0.1:5555,http://127.0.0.1:8000")
