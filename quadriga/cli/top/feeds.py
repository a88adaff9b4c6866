"""Where the messages of `quadriga top` come from: the public socket, or the web gateway."""

import argparse
import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from quadriga.client.async_client import AsyncClient
from quadriga.client.live.as_json import server_from_json, step_from_json
from quadriga.errors import ConfigError, RequestFailed, ServerUnreachable
from quadriga.wire.messages.live import LiveMessage

TIMEOUT_S = 30.0  # the gateway sends an event each second


def add_replica(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses the replica."""
    parser.add_argument(
        "--replica", type=int, default=0, metavar="N", help="which one, of a server with --dp"
    )


async def ring_messages(
    endpoint: str, curve_dir: str | None, replica: int
) -> AsyncGenerator[LiveMessage, None]:
    """Yield the messages of a server's public socket."""
    async with AsyncClient(endpoint, curve_dir=curve_dir) as client:
        async for message in client.watch(replica):
            yield message


async def gateway_messages(url: str, key: str, replica: int) -> AsyncGenerator[LiveMessage, None]:
    """Yield the messages of GET /v1/live.

    Raises:
        ServerUnreachable: there is no server, or the connection broke.
        RequestFailed: the server refuses, for example because a key is missing.
    """
    connection = _connection(url)
    try:
        response = await asyncio.to_thread(_open, connection, url, key, replica)
        name = ""
        while line := await asyncio.to_thread(response.readline):
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data" and name == "live":
                for message in _decode(value):
                    yield message
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerUnreachable(f"the connection to {url} broke: {error}") from None
    finally:
        _hang_up(connection)
    raise ServerUnreachable(f"{url} has ended the stream: the server stops")


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Close a connection. A thread that waits for its next line gets the end instead."""
    if connection.sock is not None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    if not parts.hostname:
        raise ConfigError(f"{url!r} is not the address of a server: try http://127.0.0.1:8000")
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=context)
    return http.client.HTTPConnection(parts.netloc, timeout=TIMEOUT_S)


def _open(
    connection: http.client.HTTPConnection, url: str, key: str, replica: int
) -> http.client.HTTPResponse:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    path = urlsplit(url).path.rstrip("/").removesuffix("/v1")
    try:
        connection.request("GET", f"{path}/v1/live?replica={replica}", headers=headers)
        response = connection.getresponse()
    except OSError as error:
        raise ServerUnreachable(f"no server answers at {url}: {error}") from None
    if response.status != http.client.OK:
        raise RequestFailed(f"{url} answers {response.status}: {_message(response.read())}")
    return response


def _message(body: bytes) -> str:
    """Return the message of an error's body, or the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _decode(data: str) -> list[LiveMessage]:
    body = json.loads(data)
    try:
        messages: list[LiveMessage] = [step_from_json(step) for step in body["steps"]]
        if body["server"] is not None:
            messages.append(server_from_json(body["server"]))
    except msgspec.ValidationError as error:
        raise RequestFailed(
            f"the server speaks another version of the live feed: {error}; use the quadriga of"
            " its release"
        ) from None
    return messages
