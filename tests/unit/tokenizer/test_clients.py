"""What becomes of the messages to a client that does not read, or that is gone."""

import asyncio
import logging

import msgspec
import pytest

from quadriga.errors import InvalidRequest
from quadriga.wire.async_sockets import Unreachable
from quadriga.wire.client import ServerGone, gateway_address
from tests.waiting import wait_until_async
from tokenizer_proc.deliver import clients as module
from tokenizer_proc.deliver.clients import Clients

TIMEOUT_S = 10.0


class SlowPort:
    """Takes `room` messages, and more when the test makes room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.sent: list[bytes] = []
        self.is_gone = False

    def send(self, _client: bytes, payload: bytes) -> bool:
        if self.is_gone:
            raise Unreachable
        if not self.room:
            return False
        self.room -= 1
        self.sent.append(payload)
        return True


def make(room: int) -> tuple[Clients, SlowPort, list[bytes]]:
    lost: list[bytes] = []
    clients, port = Clients(lost.append), SlowPort(room)
    clients.open(port)  # type: ignore[arg-type]
    clients.mark_seen(b"c")
    return clients, port, lost


def test_a_refusal_is_logged_with_its_reason_but_not_one_of_the_gateway(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    error = InvalidRequest("top_p is 2:\nit must be at most 1", "top_p")
    for logs_refusals in (False, True):
        clients = Clients(lambda _: None, logs_refusals)
        clients.open(SlowPort(9))  # type: ignore[arg-type]
        for client in (b"\xab\xcdefgh", gateway_address().bytes):
            clients.refuse(client, "r-1", error)
    reason = "invalid_request: top_p is 2:\\nit must be at most 1"
    assert [record.getMessage() for record in caplog.records] == [
        f"r-1 · client abcd6566 · refused · {reason}"
    ]


async def test_messages_wait_for_a_slow_reader_and_reach_it_in_order() -> None:
    clients, port, lost = make(room=2)
    messages = [b"%d" % number for number in range(50)]
    for message in messages[:30]:
        clients.deliver(b"c", message)
    assert port.sent == messages[:2]
    port.room = 5
    await wait_until_async(lambda: len(port.sent) == 7, TIMEOUT_S)
    for message in messages[30:]:
        clients.deliver(b"c", message)
    port.room = 100
    await wait_until_async(lambda: len(port.sent) == 50, TIMEOUT_S)
    assert port.sent == messages
    clients.deliver(b"c", b"at once")
    assert port.sent[-1] == b"at once"
    assert lost == []


async def test_a_flush_ends_when_a_slow_reader_has_everything_or_reads_no_more() -> None:
    clients, port, _ = make(room=1)
    for number in range(4):
        clients.deliver(b"c", b"%d" % number)
    flush = asyncio.create_task(clients.flush(stall_timeout_s=TIMEOUT_S))
    for room in (2, 1):
        await asyncio.sleep(0.05)
        assert not flush.done()
        port.room = room
    await asyncio.wait_for(flush, TIMEOUT_S)
    assert port.sent == [b"0", b"1", b"2", b"3"]
    clients.deliver(b"c", b"never read")
    await asyncio.wait_for(clients.flush(stall_timeout_s=0.05), TIMEOUT_S)


@pytest.mark.parametrize(
    ("bound", "value", "size"), [("MAX_UNREAD_BYTES", 1000, 101), ("MAX_UNREAD_MESSAGES", 9, 1)]
)
async def test_a_client_that_does_not_read_is_disconnected_at_a_bound_and_notified_when_it_reads(
    bound: str, value: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, bound, value)
    monkeypatch.setattr(module, "CUT_OFF_RETRY_S", 0.01)
    clients, port, lost = make(room=0)
    for _ in range(9):
        clients.deliver(b"c", bytes(size))
    assert lost == []
    clients.deliver(b"c", bytes(size))
    assert lost == [b"c"]
    clients.deliver(b"c", b"is dropped")
    port.room = 1
    await wait_until_async(lambda: bool(port.sent), TIMEOUT_S)
    (payload,) = port.sent
    gone = msgspec.msgpack.decode(payload, type=ServerGone)
    assert gone.error.code == "slow_reader"


async def test_a_message_over_the_bound_may_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 1000)
    clients, port, lost = make(room=0)
    clients.deliver(b"c", bytes(5000))
    port.room = 1
    await wait_until_async(lambda: port.sent == [bytes(5000)], TIMEOUT_S)
    assert lost == []


async def test_a_client_that_leaves_while_messages_wait_for_it_is_lost() -> None:
    clients, port, lost = make(room=0)
    clients.deliver(b"c", b"1")
    port.is_gone = True
    await wait_until_async(lambda: lost == [b"c"], TIMEOUT_S)
    port.is_gone, port.room = False, 10
    clients.mark_seen(b"c")
    clients.deliver(b"c", b"2")
    assert port.sent == [b"2"]


async def test_after_the_close_nothing_is_sent_to_a_client_that_lags_or_may_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PROBE_DELAYS_S", (0.0, 0.01))
    clients, port, lost = make(room=1)
    clients.deliver(b"c", b"1")
    clients.deliver(b"c", b"2")
    clients.mark_seen(b"d")
    clients.on_disconnect()
    clients.close()
    port.room = 100
    await asyncio.sleep(0.1)
    assert (port.sent, lost) == ([b"1"], [])
