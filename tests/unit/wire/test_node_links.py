"""Links between machines: only processes with the inner keys connect, and nothing is in clear."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from quadriga.clock import Countdown
from quadriga.errors import AddressInUse, ConfigError
from quadriga.wire.async_sockets import AsyncPort
from quadriga.wire.curve import INNER, SERVER, Guard, inner_key_id, load_pair, make_server_keys
from quadriga.wire.links import ON_THIS_MACHINE, Endpoints, NodeLinks, ReservedPort
from quadriga.wire.sockets import Inbox, Outbox, bind_frames
from quadriga.wire.to_scheduler import AbortRequest, SchedulerMessage
from tests.waiting import wait_until

TIMEOUT_MS = 20_000
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
MESSAGE = AbortRequest(b"c", "a prompt that nobody else reads")


@pytest.fixture
def port() -> Iterator[ReservedPort]:
    port = ReservedPort("127.0.0.1")
    yield port
    port.close()


def is_bound_again(address: str) -> bool:
    try:
        bind_frames(address).close(linger=0)
    except AddressInUse:  # ZeroMQ closes in the background
        return False
    return True


def keys(directory: Path) -> str:
    make_server_keys(directory)
    return str(directory)


def test_a_reserved_port_is_bound_again_and_again_and_given_to_no_other(port: ReservedPort) -> None:
    bind_frames(port.address).close(linger=0)
    wait_until(lambda: is_bound_again(port.address), 20)
    other = ReservedPort("127.0.0.1")
    assert other.address != port.address
    other.close()


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_message_crosses_a_link(port: ReservedPort, tmp_path: Path, has_keys: bool) -> None:
    links = NodeLinks(scheduler=port.address, key_dir=keys(tmp_path) if has_keys else "")
    inbox = Inbox[SchedulerMessage](links.scheduler, SchedulerMessage, links.prepare_bind)
    outbox = Outbox(links.scheduler, links.prepare_connect)
    outbox.send(MESSAGE)
    assert inbox.socket.poll(TIMEOUT_MS)
    assert inbox.receive() == MESSAGE
    outbox.close()
    inbox.socket.close(linger=0)


@pytest.mark.parametrize("has_key", [False, True])
def test_a_stranger_cannot_connect(port: ReservedPort, tmp_path: Path, has_key: bool) -> None:
    links = NodeLinks(scheduler=port.address, key_dir=keys(tmp_path / "ours"))
    stranger = NodeLinks(port.address, "", keys(tmp_path / "theirs") if has_key else "")
    results = bind_frames(links.scheduler, links.prepare_bind)
    monitor = results.get_monitor_socket(REFUSED)
    outbox = Outbox(stranger.scheduler, stranger.prepare_connect)
    outbox.send(MESSAGE)
    assert monitor.poll(TIMEOUT_MS), "the connection was not refused"
    assert not results.poll(0)
    outbox.close()
    results.disable_monitor()
    results.close(linger=0)


def test_a_send_to_a_peer_that_refuses_the_keys_fails_and_does_not_block(
    port: ReservedPort, tmp_path: Path
) -> None:
    links = NodeLinks(scheduler=port.address, key_dir=keys(tmp_path))
    outbox = Outbox(links.scheduler, links.prepare_connect)
    outbox.send(MESSAGE)
    without_keys = bind_frames(port.address)
    wait_until(lambda: not outbox.socket.poll(0, zmq.POLLOUT), 20)
    with pytest.raises(ConfigError, match=rf"{port.address} refuses.*--curve-dir"):
        outbox.send(MESSAGE)
    with pytest.raises(ConfigError, match="refuses"):
        outbox.send_frames(b"", b"")
    outbox.close()
    without_keys.close(linger=0)


def test_an_inner_key_has_a_name_that_does_not_give_it_away(tmp_path: Path) -> None:
    ours, theirs = keys(tmp_path / "ours"), keys(tmp_path / "theirs")
    assert inner_key_id(ours) == inner_key_id(keys(tmp_path / "ours"))
    assert inner_key_id(ours) != inner_key_id(theirs)
    assert load_pair(Path(ours), INNER).public.decode() not in inner_key_id(ours)
    assert inner_key_id("") == ""


@pytest.mark.parametrize("is_of_ranks", [False, True])
def test_nothing_is_in_clear_between_the_machines(
    port: ReservedPort, tmp_path: Path, is_of_ranks: bool
) -> None:
    where = {"ranks": ("", port.address)} if is_of_ranks else {"scheduler": port.address}
    links = NodeLinks(**where, key_dir=keys(tmp_path))
    inbox = Inbox[SchedulerMessage](port.address, SchedulerMessage, links.prepare_bind)
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_forward, args=(listener, port.address, seen), daemon=True).start()
    tapped = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    outbox = Outbox(tapped, links.prepare_connect)
    outbox.send(MESSAGE)
    assert inbox.socket.poll(TIMEOUT_MS)
    assert inbox.receive() == MESSAGE
    wire = b"".join(seen)
    assert b"CURVE" in wire
    assert MESSAGE.request_id.encode() not in wire
    outbox.close()
    inbox.socket.close(linger=0)
    listener.close()


def _forward(listener: socket.socket, address: str, seen: list[bytes]) -> None:
    """Pass one connection on in both directions, and keep what it carries."""
    host, number = address.removeprefix("tcp://").split(":")
    near, far = listener.accept()[0], socket.create_connection((host, int(number)))

    def copy(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            seen.append(data)
            target.sendall(data)

    threading.Thread(target=copy, args=(far, near), daemon=True).start()
    copy(near, far)


def test_a_missing_inner_key_is_named_with_its_remedy(tmp_path: Path) -> None:
    links = NodeLinks("tcp://127.0.0.1:9", "", str(tmp_path))
    with pytest.raises(ConfigError, match=r"inner\.key_secret.*quadriga keygen"):
        Outbox(links.scheduler, links.prepare_connect)


def test_links_of_one_machine_stay_in_the_run_directory() -> None:
    assert Endpoints(Path("/run")).scheduler == "ipc:///run/scheduler"
    links = NodeLinks("tcp://10.0.0.7:1", "tcp://10.0.0.1:2")
    far = Endpoints(Path("/run"), links)
    assert (far.scheduler, far.delivery) == ("tcp://10.0.0.7:1", "tcp://10.0.0.1:2")
    assert far.worker == "ipc:///run/worker-0"
    split = Endpoints(Path("/run"), NodeLinks(ranks=("", "", "tcp://10.0.0.8:1")))
    assert [split.rank(rank) for rank in (1, 2)] == ["ipc:///run/worker-1", "tcp://10.0.0.8:1"]
    assert split.links.host == "10.0.0.8"
    assert ON_THIS_MACHINE.prepare_bind is ON_THIS_MACHINE.prepare_connect


def test_a_key_directory_without_inner_keys_gets_them(tmp_path: Path) -> None:
    make_server_keys(tmp_path)
    for name in ("inner.key", "inner.key_secret"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    (tmp_path / "inner.key_secret").unlink()
    assert not make_server_keys(tmp_path)
    assert (tmp_path / "inner.key_secret").exists()


@pytest.mark.parametrize("is_inner", [True, False])
async def test_a_process_with_clients_lets_only_the_inner_key_deliver(
    port: ReservedPort, tmp_path: Path, is_inner: bool
) -> None:
    guard = Guard(Path(keys(tmp_path)))
    links = NodeLinks(delivery=port.address, key_dir=str(tmp_path))
    results = bind_frames(links.delivery, links.prepare_bind)
    monitor = results.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    got: list[list[bytes]] = []
    received = AsyncPort(results, got.append)

    def as_client(socket: "zmq.Socket[bytes]") -> None:
        socket.curve_serverkey = load_pair(tmp_path, INNER).public
        socket.curve_publickey, socket.curve_secretkey = load_pair(tmp_path, SERVER)

    outbox = Outbox(links.delivery, links.prepare_connect if is_inner else as_client)
    outbox.send(MESSAGE)
    countdown = Countdown(TIMEOUT_MS / 1000)
    while not (got if is_inner else monitor.poll(0)):
        assert countdown.left()
        await asyncio.sleep(0.001)
    assert bool(got) == is_inner
    outbox.close()
    results.disable_monitor()
    received.close(0)
    guard.close()
