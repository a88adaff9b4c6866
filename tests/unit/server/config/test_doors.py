"""Which sockets a server opens to clients without a key, and what its start says about them."""

import os
import stat
from pathlib import Path

import pytest

from quadriga.errors import AddressInUse, ConfigError
from quadriga.server.config import server_config as configuration
from quadriga.server.config.parser import ServerParser
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.processes import first_screen
from quadriga.wire.client import DEFAULT_ENDPOINT, PRIVATE_ENDPOINT
from quadriga.wire.sockets import SocketFile, connect_public


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUADRIGA_API_KEY", raising=False)


def started_with(*flags: str) -> ServerConfig:
    return configuration.from_namespace(ServerParser("serve").parse_flags(list(flags)))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "llm.example.org"])
def test_a_port_that_other_machines_reach_is_refused_without_keys(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as caught:
        started_with("--host", host)
    assert str(caught.value) == (
        f"host is {host}, which other machines may reach, and there are no keys: set"
        " QUADRIGA_API_KEY, or add --api-key KEY or --keys FILE, or add --insecure if every machine"
        " there may use it"
    )
    with pytest.raises(ConfigError, match="--insecure"):
        started_with("--host", host, "--tenants-by", "address")
    started_with("--host", host, "--insecure")
    started_with("--host", host, "--no-http")
    started_with("--host", host, "--api-key", "k")
    started_with("--host", host, "--keys", "keys.yaml")
    monkeypatch.setenv("QUADRIGA_API_KEY", "k")
    started_with("--host", host)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_a_port_of_this_machine_needs_no_keys(host: str) -> None:
    assert started_with("--host", host).frontend.endpoint == DEFAULT_ENDPOINT


def test_with_keys_the_zmq_socket_is_closed_to_clients_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert started_with("--api-key", "k").frontend.endpoint == PRIVATE_ENDPOINT
    assert started_with("--keys", "keys.yaml").frontend.endpoint == PRIVATE_ENDPOINT
    assert started_with("--api-key", "k", "--curve-dir", "d").frontend.endpoint == DEFAULT_ENDPOINT
    assert started_with("--api-key", "k", "--insecure").frontend.endpoint == DEFAULT_ENDPOINT
    assert started_with("--api-key", "k", "--no-http").frontend.endpoint == DEFAULT_ENDPOINT
    monkeypatch.setenv("QUADRIGA_API_KEY", "k")
    assert started_with().frontend.endpoint == PRIVATE_ENDPOINT


def test_an_open_zmq_socket_beside_keys_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="leave --endpoint out") as caught:
        started_with("--api-key", "k", "--endpoint", DEFAULT_ENDPOINT)
    assert DEFAULT_ENDPOINT in str(caught.value) and "--insecure" in str(caught.value)
    for flag in ("--insecure", "--no-http", "--curve-dir=d"):
        started_with("--api-key", "k", "--endpoint", DEFAULT_ENDPOINT, flag)
    started_with("--api-key", "k", "--endpoint", "ipc:///run/q/zmq")


def test_the_processes_of_the_server_get_the_closed_socket_and_accept_it() -> None:
    config = started_with("--api-key", "k", "--host", "0.0.0.0")
    assert started_with(*config.to_argv()) == config


@pytest.mark.parametrize(
    "endpoint", ["ipc:", "ipc://", "ipc://@name", "ipc://run/zmq", "ipc:///d/"]
)
def test_a_path_that_is_none_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"ipc:///run/quadriga/zmq"):
        started_with("--endpoint", endpoint)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "http 127.0.0.1:8000 without keys · zmq 127.0.0.1:5555 without keys"),
        (["--host", "0.0.0.0", "--api-key", "k"], "http 0.0.0.0:8000 with keys · zmq closed"),
        (
            ["--ssl-certfile", "c", "--api-key", "k", "--endpoint", "ipc:///run/q"],
            "https 127.0.0.1:8000 with keys · zmq /run/q for this user only",
        ),
        (["--no-http", "--curve-dir", "d"], "http off · zmq 127.0.0.1:5555 with keys"),
        (
            ["--host", "::", "--insecure", "--endpoint", "tcp://*:6"],
            "http [::]:8000 without keys · zmq *:6 without keys",
        ),
    ],
)
def test_the_start_says_which_doors_are_open(flags: list[str], line: str) -> None:
    assert first_screen.doors(started_with(*flags)) == line


# --- a socket that is a file ----------------------------------------------------------------------


def test_only_its_owner_may_open_the_file_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "zmq"
    mask = os.umask(0)
    try:
        file = SocketFile(f"ipc://{path}")
        socket = file.bind()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(mask)
    socket.close(linger=0)
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_server_does_not_take_the_path_over(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/zmq"
    file = SocketFile(address)
    socket = file.bind()
    inode = (tmp_path / "zmq").stat().st_ino
    with pytest.raises(AddressInUse, match="the socket of another server"):
        SocketFile(address)
    assert (tmp_path / "zmq").stat().st_ino == inode
    socket.close(linger=0)
    file.close()
    again = SocketFile(address)
    again.close()


def test_the_socket_of_a_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/zmq"
    pid = os.fork()
    if pid == 0:
        os.close(os.open(tmp_path / "zmq.lock", os.O_CREAT | os.O_WRONLY, 0o600))
        import socket as plain

        plain.socket(plain.AF_UNIX).bind(str(tmp_path / "zmq"))
        os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "zmq").is_socket()
    file = SocketFile(address)
    file.bind().close(linger=0)
    file.close()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="something else than a socket lies"):
        SocketFile(f"ipc://{path}")
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["notes"]
    with pytest.raises(ConfigError, match="No such file or directory"):
        SocketFile(f"ipc://{tmp_path}/missing/zmq")


def test_messages_pass_through_the_file_in_both_directions(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/zmq"
    file = SocketFile(address)
    server = file.bind()
    clients = [connect_public(address, name) for name in (b"first", b"second")]
    try:
        for client in clients:
            client.send(b"question")
            name, text = server.recv_multipart()
            server.send_multipart([name, text + b" of " + name])
        assert [client.recv() for client in clients] == [
            b"question of first", b"question of second",
        ]  # fmt: skip
    finally:
        for socket in (*clients, server):
            socket.close(linger=0)
        file.close()
