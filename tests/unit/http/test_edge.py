"""Slow, silent and too many clients, and the request log."""

import asyncio
import json
import logging
import socket
import ssl
import subprocess
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import pytest
import uvloop
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request

from http_proc import server
from http_proc.core.observe import RequestMetrics
from http_proc.web import exchange, request_scope
from http_proc.web import request_scope as slow_client
from http_proc.web.exchange import GATEWAY
from tests.unit.scripted_ring import ScriptedRing, chunk, gateway_before, run_at_gateway

ASK = {"prompt": "a secret", "max_tokens": 4}


def request(body: dict[str, Any], cut: int = 0, path: str = "/v1/completions") -> bytes:
    """Return a POST of the body without its last `cut` bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data[: len(data) - cut]


async def connect(gateway: Any, data: bytes = b"", buffer: int | None = None) -> socket.socket:
    """Return a connection on which `data` was sent. `buffer`: bytes of its receive buffer."""
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", gateway.args.port))
    await loop.sock_sendall(client, data)
    return client


async def answer(client: socket.socket) -> bytes:
    """Return everything that arrives until the server closes the connection."""
    loop, received = asyncio.get_running_loop(), b""
    while data := await loop.sock_recv(client, 1 << 16):
        received += data
    client.close()
    return received


def has_gone(ring: ScriptedRing, gateway: Any) -> bool:
    return gateway.metrics.num_slow_readers == 1 and gateway.num_open == 0 and ring.handles[0].done


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_reads_nothing_or_a_byte_at_a_time_is_disconnected_and_counted(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(slow_client, "CHECK_INTERVAL_S", 0.1)
    ring = ScriptedRing(["a"], leaves_open=True)
    async with gateway_before(ring) as (_, gateway):
        client = await connect(gateway, request(ASK | {"stream": True}), 4096)
        while not ring.sinks:
            await asyncio.sleep(0)
        while not gateway.metrics.num_slow_readers:
            ring.sinks[0](chunk("a" * 100_000))
            await asyncio.sleep(0.01)
            if reads:
                await asyncio.get_running_loop().sock_recv(client, 1)
        while not has_gone(ring, gateway):
            await asyncio.sleep(0.01)
        assert ring.handles[0].aborted
        client.close()


async def test_a_client_that_does_not_read_a_whole_answer_is_disconnected_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_client, "CHECK_INTERVAL_S", 0.1)
    ring = ScriptedRing(["a" * 8_000_000])
    async with gateway_before(ring) as (_, gateway):
        client = await connect(gateway, request(ASK), 4096)
        while not ring.handles or not has_gone(ring, gateway):
            await asyncio.sleep(0.01)
        client.close()


async def test_whole_answers_that_are_not_read_have_a_bound_together_and_a_reader_gets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slow_client, "MAX_UNREAD_BYTES", 20_000_000)
    ring = ScriptedRing(["a" * 8_000_000])
    async with gateway_before(ring) as (_, gateway):
        clients = [await connect(gateway, request(ASK), 4096) for _ in range(6)]
        while gateway.metrics.num_slow_readers < 4:
            await asyncio.sleep(0.01)
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{gateway.args.url}/v1/completions", json=ASK) as response,
        ):
            assert len(await response.read()) > 8_000_000
        assert gateway.metrics.num_slow_readers == 5
        for client in clients:
            client.close()


@pytest.mark.parametrize(("coding", "window_bits"), [("gzip", 31), ("deflate", 15)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing", "/v1/models"])
async def test_a_body_that_unpacks_to_much_is_unpacked_up_to_the_limit_only(
    monkeypatch: pytest.MonkeyPatch, coding: str, window_bits: int, path: str
) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, window_bits)
    bomb = packer.compress(b'{"prompt":"') + packer.compress(b"a" * 20_000_000) + packer.flush()
    unpacked, feed = [], aiohttp.StreamReader.feed_data

    def feed_data(reader: aiohttp.StreamReader, data: bytes, size: int = 0) -> bool:
        unpacked.append(len(data))
        return feed(reader, data, size)

    monkeypatch.setattr(aiohttp.StreamReader, "feed_data", feed_data)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {coding}\r\n"
    async with gateway_before(ScriptedRing([]), max_body_bytes=1000000) as (_, gateway):
        data = f"{head}Content-Length: {len(bomb)}\r\n\r\n".encode() + bomb
        client = await connect(gateway, data)
        said = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        assert int(said.split()[1]) in (404, 405, 413)
        with suppress(ConnectionResetError):  # the rest of the body is not read
            await answer(client)
        assert sum(unpacked) < 4_000_000


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_list_of_prompts_is_refused(stream: bool) -> None:
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        for path, field in (("/v1/completions", "prompt"), ("/generate", "text")):
            client = await connect(gateway, request({field: [], "stream": stream}, path=path))
            said = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
            assert said.startswith(b"HTTP/1.1 400 ")
            assert f"{field} is an empty list".encode() in said
            client.close()
        assert gateway.num_open == 0


async def test_a_slow_client_that_takes_enough_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test calls the check whenever the client has read enough, so that no clock decides."""
    guards: list[slow_client.SlowClientGuard] = []

    class RecordedGuard(slow_client.SlowClientGuard):
        def __enter__(self) -> slow_client.SlowClientGuard:
            guards.append(self)
            assert self._transport is not None
            server_socket = self._transport.get_extra_info("socket")
            server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
            return super().__enter__()

    monkeypatch.setattr(request_scope, "SlowClientGuard", RecordedGuard)
    ring = ScriptedRing(["a" * 8_000_000])
    async with gateway_before(ring) as (_, gateway):
        client, taken, sent, num_checks = await connect(gateway, request(ASK), 1 << 16), 0, 0, 0
        while taken < 8_000_000:
            piece = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
            assert piece, "the client was disconnected"
            taken += len(piece)
            await asyncio.sleep(0)
            waiting, now_sent = guards[0].progress()
            if waiting and now_sent - sent >= slow_client.MIN_BYTES_PER_INTERVAL:
                guards[0]._check()
                sent, num_checks = now_sent, num_checks + 1
        assert gateway.metrics.num_slow_readers == 0
        assert num_checks > 10
        client.close()


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_over_tls_a_long_stream_comes_to_its_end(tmp_path: Path, run_loop: Any) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-subj", "/CN=localhost", "-nodes", "-newkey", "rsa:2048"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    ring = ScriptedRing(["a" * 10_000] * 50)

    async def whole() -> None:
        flags = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        async with gateway_before(ring, **flags) as (url, _):
            port = int(url.rpartition(":")[2])
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trusting, limit=1 << 20
            )
            for _ in range(3):
                writer.write(request(ASK | {"stream": True}))
                text = await reader.readuntil(b"[DONE]")
                await reader.readuntil(b"\r\n0\r\n\r\n")
                assert text.count(b"a" * 10_000) == 50
            writer.close()

    run_loop(asyncio.wait_for(whole(), 20))


async def test_a_head_that_does_not_come_to_an_end_closes_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.2)
    async with gateway_before(ScriptedRing([])) as (_, gateway):
        slow = await connect(gateway, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        silent = await connect(gateway)
        assert await answer(slow) == await answer(silent) == b""


async def test_a_body_that_does_not_come_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.1)
    async with gateway_before(ScriptedRing([])) as (_, gateway):
        client = await connect(gateway, request(ASK, cut=1))
        response = await asyncio.get_running_loop().sock_recv(client, 4096)
        assert response.startswith(b"HTTP/1.1 408 ")
        assert gateway.bodies.total == 0
        client.close()


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_client_that_leaves_while_its_body_ends_is_not_answered(num_turns: int) -> None:
    """Cancel the handler `num_turns` turns of the event loop after the last byte."""
    async with gateway_before(ScriptedRing([])) as (_, gateway):
        content = StreamReader(mock.Mock(), 65536)
        received = make_mocked_request("POST", "/", payload=content, app={GATEWAY: gateway})
        handler = asyncio.create_task(exchange.read_object(received))
        await asyncio.sleep(0.01)
        content.feed_data(b"{}")
        content.feed_eof()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        was_cancelled = handler.cancel()  # False: the handler had the body before
        await asyncio.wait([handler])
        assert handler.cancelled() == was_cancelled
        assert gateway.bodies.total == 0


async def test_bodies_that_come_at_once_have_a_bound_together() -> None:
    async with gateway_before(ScriptedRing([]), max_body_bytes=1000) as (_, gateway):
        gateway.bodies.limit = 1500
        large = ASK | {"prompt": "a" * 900}
        first = await connect(gateway, request(large, cut=1))
        while not gateway.bodies.total:
            await asyncio.sleep(0)
        second = await connect(gateway, request(large, cut=1))
        response = await asyncio.get_running_loop().sock_recv(second, 4096)
        assert response.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in response
        assert b"too_many_bodies" in response
        first.close()
        second.close()


@pytest.mark.parametrize("run_loop", [asyncio.run, uvloop.run])
def test_connections_over_the_limit_get_a_503_and_are_counted(run_loop: Any) -> None:
    async def test(gateway: Any) -> None:
        first = await connect(gateway)
        while not gateway.metrics.num_refused_connections:
            response = await answer(await connect(gateway, request(ASK)))
        assert response.startswith(b"HTTP/1.1 503 ") and b"Retry-After: 1" in response
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == (
            "too_many_connections"
        )
        first.close()

    ring = ScriptedRing(["a"])
    run_at_gateway(ring, test, run_loop=run_loop, max_http_connections=1)
    assert not ring.handles


async def test_each_request_is_a_line_of_the_log_and_no_line_has_a_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ring = ScriptedRing(["a", "b"])
    async with gateway_before(
        ring, log_requests=True, api_key="hidden", max_http_connections=9
    ) as (_, gateway):
        key = b"HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer hidden\r\nX-Request-Id: abc"
        for body in (ASK, ASK | {"stream": True}, ASK | {"max_tokens": "x"}):
            data = request(body).replace(b"HTTP/1.1", key, 1)
            await answer(await connect(gateway, data))
        ring.leaves_open = True
        gone = await connect(gateway, request(ASK).replace(b"HTTP/1.1", key, 1))
        while not ring.handles[2:]:
            await asyncio.sleep(0)
        gone.close()
        while gateway.num_open:
            await asyncio.sleep(0)
    lines = [record.getMessage() for record in caplog.records if record.name == "root"]
    whole, streamed, wrong, left = lines
    for line in (whole, streamed):
        assert line.startswith("cmpl-abc · POST /v1/completions 200 · ")
        assert " · stop · prompt 3 tokens, 0 cached · generated 2 · " in line
    assert wrong.startswith("POST /v1/completions 400 · ")
    assert wrong.endswith("Expected `int | null`, got `str` - at `$.max_tokens`")
    assert "the client left" in left
    assert not any("secret" in line or "hidden" in line for line in lines)


def test_a_slow_request_is_logged_with_its_stages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def test(gateway: Any) -> None:
        data = request(ASK).replace(b"HTTP/1.1", b"HTTP/1.1\r\nConnection: close", 1)
        await answer(await connect(gateway, data))

    for seconds in (1000.0, 1e-9):
        run_at_gateway(ScriptedRing(["a"]), test, log_slow_requests=seconds)
    (record,) = [record for record in caplog.records if record.name == "root"]
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("slow: cmpl-")
    for stage in ("stages: tokenize", "queue", "prefill", "decode", "detokenize", "delivery"):
        assert f"{stage} " in record.getMessage()


class Stalled:
    """A request, its writer and its transport, whose client reads nothing."""

    output_size = 10_000
    aborted = False

    def __init__(self) -> None:
        self.writer = self.transport = self

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 5_000

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True


async def test_a_suspension_of_the_gateway_itself_disconnects_no_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    loop, connection = asyncio.get_running_loop(), Stalled()
    suspended = 0.0
    monkeypatch.setattr(loop, "time", lambda real=loop.time: real() + suspended)
    observer = slow_client.SlowClientGuard(connection, RequestMetrics())  # type: ignore[arg-type]
    with observer:
        for seconds in (slow_client.CHECK_INTERVAL_S, 1000.0):
            suspended += seconds
            observer._check()
            assert not connection.aborted
        suspended += slow_client.CHECK_INTERVAL_S
        observer._check()
        assert connection.aborted
