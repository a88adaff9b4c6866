"""Requests that the HTTP layer refuses: each gets a 4xx in the gateway's form."""

import asyncio
import gzip
import json
import logging
import zlib
from typing import Any

import pytest

from http_proc import server
from tests.unit.scripted_ring import ScriptedRing, gateway_before

BODY = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
PACKED = gzip.compress(BODY, mtime=0)


async def ask(gateway: Any, data: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body of the answer to bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.args.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    headers = dict(line.split(b": ", 1) for line in lines)
    return int(status.split(b" ")[1]), headers, body


def post(path: str, body: bytes, *lines: bytes) -> bytes:
    head = [b"POST %s HTTP/1.1" % path.encode(), b"Host: localhost", b"Connection: close", *lines]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body


def check_form(status: int, headers: dict[bytes, bytes], body: bytes, api: str = "") -> None:
    """Check that an answer is an error of the client in the form of an API."""
    assert 400 <= status < 500, body
    assert headers[b"Server"] == b"quadriga"
    assert headers[b"Content-Type"].startswith(b"application/json")
    error = json.loads(body)["error"]
    assert (error if api == "ollama" else error["message"]) and b"aiohttp" not in body


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        (b"gzip", b"no gzip"),
        (b"gzip", PACKED[:-12]),
        (b"gzip", PACKED[:12]),
        (b"gzip", PACKED[:20] + b"\xff" * 20),
        (b"deflate", b"\xff" * 30),
        (b"deflate", zlib.compress(BODY)[:-6]),
        (b"br", b"\x0b\x02\x80"),
        (b"zstd", b"\x28\xb5\x2f\xfd"),
        (b"compress", BODY),
        (b"gzip, gzip", gzip.compress(PACKED, mtime=0)),
        (b"\xff", BODY),
    ],
)
async def test_a_body_that_cannot_be_unpacked_is_an_error_of_the_client_at_every_endpoint(
    caplog: pytest.LogCaptureFixture, coding: bytes, body: bytes
) -> None:
    paths = [e.path.replace("{name}", "x") for e in server.ENDPOINTS if e.method == "post"]
    paths.remove("/flush_cache")  # which has no body, and which the scripted ring does not know

    caplog.set_level(logging.ERROR)
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        for path in dict.fromkeys(paths):
            lines = [b"Content-Encoding: " + coding]
            if path == "/v1/files":
                lines.append(b"Content-Type: multipart/form-data; boundary=X")
            status, headers, answer = await ask(gateway, post(path, body, *lines))
            assert status in (400, 404, 415, 501, 503), (path, status, answer)
            if status < 500:
                check_form(status, headers, answer, "ollama" if path.startswith("/api/") else "")
    assert not [record for record in caplog.records if record.name != "aiohttp.server"]


async def test_packed_bodies_are_read() -> None:
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        for coding, body in ((b"gzip", PACKED), (b"deflate", zlib.compress(BODY))):
            line = b"Content-Encoding: " + coding
            assert (await ask(gateway, post("/v1/completions", body, line)))[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/nothing", "/ui/index.html", "/api/chat"])
async def test_another_expectation_is_a_417_in_the_form_of_the_api(path: str) -> None:
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        status, headers, body = await ask(gateway, post(path, BODY, b"Expect: 200-ok"))
        assert status == 417
        check_form(status, headers, body, "ollama" if path.startswith("/api/") else "")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"G\xffT / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
        b"Content-Length: 2\r\n\r\nab",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: br\r\n"
        b"Connection: close\r\nContent-Length: 3\r\n\r\nabc",
    ],
)
async def test_what_the_parser_refuses_is_answered_in_json_without_the_name_of_a_library(
    caplog: pytest.LogCaptureFixture, data: bytes
) -> None:

    caplog.set_level(logging.ERROR)
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        check_form(*(await ask(gateway, data)))
    assert not [record for record in caplog.records if record.name != "aiohttp.server"]


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
async def test_an_answer_without_a_length_ends_with_its_connection_in_http_1_0(path: str) -> None:
    body = json.dumps({"prompt": "x", "model": "tiny", "stream": True}).encode()
    head = f"POST {path} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.args.port)
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.read(), 10)  # to the end of the connection
        assert b" 200 " in answer[:20] and b"keep-alive" not in answer.partition(b"\r\n\r\n")[0]
        writer.close()


async def test_an_answer_with_a_length_keeps_the_connection_in_http_1_0() -> None:
    request = b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.args.port)
        for _ in range(2):
            writer.write(request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert b" 200 " in head[:20]
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()
