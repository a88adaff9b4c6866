"""Errors for a client that was given the address of the web gateway, the commonest mix-up."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress

from quadriga.config.frontend_args import DEFAULT_ENDPOINT
from quadriga.errors import ConfigError

# A listener that does not answer a first ping for so long is asked whether it is a web server.
PROBE_DELAY_S = 0.5
PROBE_TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
_REQUEST = b"GET /server_info HTTP/1.0\r\nHost: localhost\r\n\r\n"


def check_endpoint(endpoint: str) -> None:
    """Raise ConfigError for the address of a web server."""
    if any(part.strip().startswith(("http://", "https://")) for part in endpoint.split(",")):
        raise ConfigError(
            f"endpoint is {endpoint!r}, a web address, which OpenAI clients use: this client needs"
            f" the ZeroMQ endpoint, the `zmq` address of the server's start line"
            f" ({DEFAULT_ENDPOINT} by default)"
        )


class HttpProbe:
    """Asks the listener of a first connection whether it is a web server.

    Args:
        found: called with what to say, if it is one.
    """

    def __init__(self, found: Callable[[str], None]) -> None:
        self._found = found
        self._task: asyncio.Task[None] | None = None

    def start(self, endpoint: str) -> None:
        """Ask after PROBE_DELAY_S, once until `stop`."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._ask_later(endpoint))

    def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _ask_later(self, endpoint: str) -> None:
        await asyncio.sleep(PROBE_DELAY_S)
        if reason := await _describe_http_port(endpoint):
            self._found(reason)


async def _describe_http_port(endpoint: str) -> str:
    """Ask an endpoint for a web page, and return what to say if it answers; else ""."""
    address = re.fullmatch(r"tcp://(.+):(\d+)", endpoint)
    if address is None:
        return ""
    answer = b""
    with suppress(OSError, asyncio.TimeoutError):
        answer = await asyncio.wait_for(
            _ask(address[1].strip("[]"), int(address[2])), PROBE_TIMEOUT_S
        )
    if not answer.startswith(b"HTTP/"):
        return ""
    known = _endpoint_in(answer)
    place = f"is {known}" if known else f"is {DEFAULT_ENDPOINT} by default"
    return f"{endpoint} is an HTTP port: the ZMQ endpoint of the server {place}"


async def _ask(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_REQUEST)
        answer = b""
        while len(answer) < MAX_ANSWER_BYTES and (data := await reader.read(65536)):
            answer += data
        return answer
    finally:
        writer.close()


def _endpoint_in(answer: bytes) -> str:
    """Return the endpoint that a /server_info has; "" if it is another server's or needs a key."""
    try:
        info = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return ""
    endpoint = info.get("endpoint", "") if isinstance(info, dict) else ""
    return endpoint if isinstance(endpoint, str) else ""
