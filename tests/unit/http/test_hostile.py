"""Requests with bytes that are not text, and answers of probes while the ring starts."""

import asyncio
import logging
from typing import Any

import pytest

from http_proc.apis import service
from quadriga.errors import DeadlineExceeded
from tests.unit.scripted_ring import ScriptedRing, gateway_before

KEY = "kö"
HEADERS = [
    "Accept",
    "Accept-Encoding",
    "Access-Control-Request-Headers",
    "Access-Control-Request-Method",
    "Connection",
    "Content-Encoding",
    "Content-Type",
    "Cookie",
    "Expect",
    "If-None-Match",
    "Last-Event-ID",
    "Origin",
    "Range",
    "Sec-WebSocket-Key",
    "Upgrade",
    "User-Agent",
    "X-Forwarded-For",
    "X-Request-Id",
]
NOT_TEXT = [
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xc3\xa9",
    b"\xf0\x9f\x98\x80",
    b"a\x01b",
    b"x" * 7000,
    b"",
]
PATHS = [
    b"/%ff",
    b"/\xff",
    b"/v1/models/%ff",
    b"/v1/models/%ed%a0%80",
    b"/v1/models/%0aX%1b[31m",
    b"/%00",
    b"/%0aFAKE",
    b"/?\xff=%ff",
    b"/livez?%ff",
    b"/livez?a=\xff",
    b"/livez#%ff",
    b"http://[::1",
    b"*",
    b"?x",
    b"http://a:99999/livez",
    b"http://\xff/livez",
    b"//",
    b"/%",
    b"/%zz",
    b"/" + b"a" * 8000,
]
BODIES = [
    b"\xff",
    b'{"prompt":"\xff"}',
    b'{"prompt":"\\ud800"}',
    b'{"\\ud800":1}',
    b"[" * 100_000,
    b"NaN",
    b'{"model":"\\ud800","prompt":"x"}',
    b'{"prompt":"x","temperature":1e999}',
    b'{"prompt":"x","n":1e30}',
    b'{"prompt":"x","metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
]


async def ask(gateway: Any, request: bytes) -> tuple[int, bytes]:
    """Return the status and the bytes of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.args.port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return int(answer.split(b" ", 2)[1]), answer


def request(method: bytes, path: bytes, *lines: bytes, body: bytes = b"", key: str = KEY) -> bytes:
    head = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", b"Connection: close"]
    head += [b"Authorization: Bearer " + key.encode()] if key else []
    head += [*lines, b"Content-Length: %d" % len(body)]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The log without aiohttp's errors about bytes that are not HTTP."""
    caplog.set_level(logging.CRITICAL, "aiohttp.server")
    caplog.set_level(logging.INFO)
    return caplog


def check_log(log: pytest.LogCaptureFixture) -> None:
    for record in log.records:
        assert record.exc_info is None
        assert record.getMessage().isprintable()


async def test_a_key_of_other_bytes_is_a_401_and_the_right_one_is_compared_as_bytes(
    log: pytest.LogCaptureFixture,
) -> None:
    async with gateway_before(ScriptedRing(["a"]), api_key=KEY) as (_, gateway):
        for given in (b"\xff\xfe", b"k\xf6", b"\xed\xa0\x80", b"", b"k"):
            line = b"Authorization: Bearer " + given
            status, answer = await ask(gateway, request(b"GET", b"/v1/models", line, key=""))
            assert status == 401
            assert b"invalid_api_key" in answer
        assert (await ask(gateway, request(b"GET", b"/v1/models")))[0] == 200
    check_log(log)


async def test_no_header_makes_a_500_or_a_traceback(log: pytest.LogCaptureFixture) -> None:
    body = b'{"prompt": "x", "max_tokens": 2}'

    flags = {"api_key": KEY, "allowed_origins": "https://a.example", "log_requests": True}
    async with gateway_before(ScriptedRing(["a"]), **flags) as (_, gateway):
        for name in HEADERS:
            for value in NOT_TEXT:
                line = name.encode() + b": " + value
                post = request(b"POST", b"/v1/completions", line, body=body)
                status, _ = await ask(gateway, post)
                assert status in (200, 400, 413, 415, 417), line[:40]
                if name == "Expect":
                    continue  # aiohttp handles it for a path or method that is not served
                preflight = request(
                    b"OPTIONS", b"/v1/completions", line, b"Origin: https://a.example"
                )
                status, _ = await ask(gateway, preflight)
                assert status in (200, 204, 400, 405, 415, 417), line[:40]
    check_log(log)


async def test_no_path_and_no_body_makes_a_500_or_a_line_of_its_own_in_the_log(
    log: pytest.LogCaptureFixture,
) -> None:
    async with gateway_before(ScriptedRing(["a"]), api_key=KEY, log_requests=True) as (_, gateway):
        for path in PATHS:
            for method in (b"GET", b"POST"):
                status, _ = await ask(gateway, request(method, path))
                assert status < 500, path[:40]
        for body in BODIES:
            status, answer = await ask(gateway, request(b"POST", b"/v1/completions", body=body))
            assert status == 400, body[:40]
            assert b"invalid_request_error" in answer
    check_log(log)


class LoadingRing(ScriptedRing):
    """A ring that is ready at the question `ready_at`, and does not answer the first one."""

    def __init__(self, ready_at: int) -> None:
        super().__init__([])
        self.num_asked = 0
        self.ready_at = ready_at

    async def info(self, timeout: float) -> dict[str, Any]:
        self.num_asked += 1
        if self.num_asked == 1:
            raise DeadlineExceeded("no answer")
        return self.facts | {"ready": self.num_asked >= self.ready_at}


async def test_the_start_is_over_once_a_probe_would_say_so() -> None:
    ring = LoadingRing(4)
    async with gateway_before(ring) as (_, gateway):
        await gateway.until_ready()
        assert ring.num_asked == 4
        assert (await ask(gateway, request(b"GET", b"/readyz")))[0] == 200


async def test_only_the_answer_that_the_ring_is_ready_holds_for_later_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "READY_MAX_AGE_S", 60.0)
    ring = LoadingRing(3)
    async with gateway_before(ring) as (_, gateway):
        statuses = [(await ask(gateway, request(b"GET", b"/readyz")))[0] for _ in range(5)]
        assert statuses == [503, 503, 200, 200, 200]
