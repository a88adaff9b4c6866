"""The endpoints of a server that the commands use, with the standard library alone."""

import http.client
import json
import os
import ssl
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from quadriga import disk
from quadriga.errors import QuadrigaError, ServerUnreachable

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
    """

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
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
        exchange = _Exchange(self, "GET", f"/files/{file_id}/content", None, {})
        with exchange as response, fresh.open("wb") as file:
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
        with _Exchange(self, method, path, body, headers or {}) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def connect(self) -> http.client.HTTPConnection:
        """Return a new connection."""
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._address, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)

    def send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        """Send a request, and return its answer if it is a 200."""
        connection.request(method, self._prefix + path, body, self._headers | headers)
        response = connection.getresponse()
        if response.status == http.client.OK:
            return response
        text = response.read(10_000).decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = " ".join(text.split())[:300]
        raise CallRefused(response.status, f"{response.status} for {path}: {text}")


class _Exchange:
    """One request in a `with` block, whose connection ends with it."""

    def __init__(
        self,
        api: ServerApi,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None,
        headers: dict[str, str],
    ) -> None:
        self._api = api
        self._request = (method, path, body, headers)
        self._connection = api.connect()

    def __enter__(self) -> http.client.HTTPResponse:
        try:
            return self._api.send(self._connection, *self._request)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            address = self._connection.host
            raise ServerUnreachable(
                f"no server answers at {address}:{self._connection.port}: {error}"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def _pieces(head: bytes, file: BinaryIO, tail: bytes) -> Iterator[bytes]:
    yield head
    while piece := file.read(PIECE_BYTES):
        yield piece
    yield tail
