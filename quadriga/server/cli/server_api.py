"""The endpoints of a server that the commands use, with the standard library alone."""

import http.client
import json
import os
import socket
import ssl
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from quadriga import disk
from quadriga.errors import ConfigError, QuadrigaError, ServerUnreachable

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 60.0
PIECE_BYTES = 1024 * 1024


class CallRefused(QuadrigaError):
    """The server has refused a call.

    Attributes:
        status: the HTTP status.
    """

    code = "call_refused"

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServerApi:
    """Files, batches and traces of a server by HTTP.

    Args:
        url: of the server, with or without /v1.
        key: API key, or "".

    Raises:
        ConfigError: the address has no host.
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if not parts.hostname:
            raise ConfigError(f"{url!r} is not the address of a server: try {DEFAULT_URL}")
        self._is_tls = parts.scheme == "https"
        self._address = parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def upload(self, path: Path) -> str:
        """Upload a file and return its id."""
        boundary = uuid.uuid4().hex
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"'
            "\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        with path.open("rb") as file:
            size = len(head) + os.fstat(file.fileno()).st_size + len(tail)
            headers = {
                "Content-Type": f"multipart/form-data; boundary={boundary}",
                "Content-Length": str(size),
            }
            body = _pieces(head, file, tail)
            return str(self._call("POST", "/files", body, headers)["id"])

    def create(self, file_id: str, endpoint: str) -> dict[str, Any]:
        """Start a batch and return it."""
        fields = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        headers = {"Content-Type": "application/json"}
        return self._call("POST", "/batches", json.dumps(fields).encode(), headers)

    def batch(self, batch_id: str) -> dict[str, Any]:
        """Return a batch."""
        return self._call("GET", f"/batches/{batch_id}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End a batch and return it."""
        return self._call("POST", f"/batches/{batch_id}/cancel")

    def trace(self, request_id: str) -> dict[str, Any]:
        """Return the trace of a request that has ended, by its id."""
        return self._call("GET", f"/requests/{quote(request_id, safe='')}/trace")

    def download(self, file_id: str, path: Path) -> None:
        """Write the content of a file to a path, which has all of it or is not changed."""
        fresh = path.with_name(path.name + ".part")
        call = self.call("GET", f"/files/{file_id}/content")
        with call as response, fresh.open("wb") as file:
            while piece := response.read(PIECE_BYTES):
                file.write(piece)
            if response.length:
                raise ServerUnreachable(f"the connection broke while {path} came: run it again")
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        disk.sync_directory(path.parent)

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        with self.call(method, path, body, headers) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
    ) -> "ServerCall":
        """Return a request, which is sent when its `with` block begins. path: below /v1."""
        if self._is_tls:
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._address, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        request = (method, self._prefix + path, body, self._headers | (headers or {}))
        return ServerCall(connection, request)


class ServerCall:
    """A request and its answer, in a `with` block that closes the connection at its end.

    Args:
        connection: a new connection.
        request: method, path, body and headers.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        request: tuple[str, str, bytes | Iterator[bytes] | None, dict[str, str]],
    ) -> None:
        self._connection = connection
        self._request = request

    def __enter__(self) -> http.client.HTTPResponse:
        """Send the request, and return the answer if it is a 200.

        Raises:
            ServerUnreachable: no server answers.
            CallRefused: the server answers with another status.
        """
        connection = self._connection
        try:
            connection.request(*self._request)
            response = connection.getresponse()
            if response.status == http.client.OK:
                return response
            body = response.read(10_000).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            address = f"{connection.host}:{connection.port}"
            raise ServerUnreachable(f"no server answers at {address}: {error}") from None
        connection.close()
        path = self._request[1]
        raise CallRefused(response.status, f"{response.status} for {path}: {_message(body)}")

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def hang_up(self) -> None:
        """End the connection. A thread that waits for its next line gets the end instead."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def events_of(lines: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the events of a stream (SSE): the name, "" without one, and a line of data."""
    name = ""
    for line in lines:
        field, _, value = line.decode().rstrip("\r\n").partition(":")
        if field == "event":
            name = value.strip()
        elif field == "data":
            yield name, value.removeprefix(" ")
        elif not field and not value:
            name = ""


def _message(body: str) -> str:
    """Return the message of an error's body, or the body in one line."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return " ".join(body.split())[:300]


def _pieces(head: bytes, file: BinaryIO, tail: bytes) -> Iterator[bytes]:
    yield head
    while piece := file.read(PIECE_BYTES):
        yield piece
    yield tail
