"""The endpoints of a server that the commands use, with the standard library as HTTP client."""

import base64
import http.client
import json
import os
import socket
import ssl
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from quadriga import disk
from quadriga.client.types import Completion, Prompt, StreamChunk, Timings
from quadriga.clock import now
from quadriga.errors import ConfigError, PromptTooLong, QuadrigaError, ServerUnreachable
from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import Pooling
from quadriga.wire.client import Usage

DEFAULT_URL = "http://127.0.0.1:8000"
VERSION = "/v1"
TIMEOUT_S = 60.0
PIECE_BYTES = 1024 * 1024
DONE = "[DONE]"
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code of a prompt that is too long


class CallRefused(QuadrigaError):
    """The server has refused a call.

    Attributes:
        status: the HTTP status.
        reason: the code that the server gives the error; "" without one.
    """

    code = "call_refused"

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


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
        self._root = parts.path.rstrip("/").removesuffix("/v1")
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

    def models(self) -> list[dict[str, Any]]:
        """Return the models that are served."""
        models: list[dict[str, Any]] = self._call("GET", "/models")["data"]
        return models

    def model(self, name: str) -> dict[str, Any]:
        """Return a model by its name or alias. Raise CallRefused for another name."""
        return self._call("GET", f"/models/{quote(name, safe='')}")

    def model_states(self) -> list[dict[str, Any]]:
        """Return the models with their states, as GET /models lists them."""
        models: list[dict[str, Any]] = self._call("GET", "/models", version="")["data"]
        return models

    def state(self, name: str) -> str:
        """Return the state of a model. Raise ConfigError for a name that no model has."""
        models = self.model_states()
        for model in models:
            if name == model["id"] or name in model["aliases"]:
                return str(model["status"]["value"])
        names = ", ".join(repr(model["id"]) for model in models)
        raise ConfigError(f"model {name!r} is not served there: use one of {names}")

    def load(self, name: str) -> None:
        """Ask for a model to be loaded as soon as there is room."""
        self._post("/models/load", {"model": name})

    def unload(self, name: str, wait_s: int) -> None:
        """Unload a model. Raise CallRefused if it is still busy after `wait_s` seconds."""
        self._post(f"/models/unload?wait={wait_s}", {"model": name})

    def _post(self, path: str, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        self._call("POST", path, json.dumps(body).encode(), headers, version="")

    def embeddings(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of /v1/embeddings to a body."""
        headers = {"Content-Type": "application/json"}
        return self._call("POST", "/embeddings", json.dumps(body).encode(), headers)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the objects of an answer that comes in events; the last one is `[DONE]`.

        Raises:
            ServerUnreachable: no server answers, or the connection broke.
            CallRefused: the server refuses the request, or ends it with an error.
        """
        headers = {"Content-Type": "application/json"}
        with self.call("POST", path, json.dumps(body).encode(), headers) as response:
            try:
                for _, data in events_of(iter(response.readline, b"")):
                    if data == DONE:
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise CallRefused(response.status, *_error_in(data))
                    yield event
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise ServerUnreachable(f"the connection to the server broke: {error}") from None
            raise ServerUnreachable("the connection to the server ended before the answer did")

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
        version: str = VERSION,
    ) -> dict[str, Any]:
        with self.call(method, path, body, headers, version) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def call(
        self,
        method: str,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: dict[str, str] | None = None,
        version: str = VERSION,
    ) -> "ServerCall":
        """Return a request, which is sent when its `with` block begins. path: below `version`."""
        if self._is_tls:
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._address, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(self._address, timeout=TIMEOUT_S)
        request = (method, self._root + version + path, body, self._headers | (headers or {}))
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
        message, reason = _error_in(body)
        text = f"{response.status} for {self._request[1]}: {message}"
        raise CallRefused(response.status, text, reason)

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def hang_up(self) -> None:
        """End the connection. A thread that waits for its next line gets the end instead."""
        if self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class GatewayClient:
    """Asks a server with OpenAI's API, with the methods of `Client` that ask and chat call.

    Args:
        url: of the server.
        key: API key, or "".
        on_reasoning: called with each piece of a reasoning, which is no part of the answer.
        model: name or alias of one of its models; "": the first one.
    """

    def __init__(
        self, url: str, key: str, on_reasoning: Callable[[str], None], model: str = ""
    ) -> None:
        self._model = model
        self._api = ServerApi(url, key)
        self._on_reasoning = on_reasoning
        self._card: dict[str, Any] | None = None

    def __enter__(self) -> "GatewayClient":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: each call has a connection of its own."""

    def info(self) -> dict[str, Any]:
        """Return the name of the served model, and whether it takes chats."""
        if self._card is None:
            self._card = self._api.model(self._model) if self._model else self._api.models()[0]
        capabilities = self._card.get("capabilities") or {}
        return {"model": self._card["id"], "chat": capabilities.get("chat", True)}

    def embed(self, texts: list[str], pooling: Pooling, truncate: bool) -> list["array[float]"]:
        """Return the vectors of texts, in order.

        Raises:
            CallRefused: the server refuses the request.
            ServerUnreachable: no server answers.
        """
        body: dict[str, Any] = {
            **({"model": self._model} if self._model else {}),
            "input": texts,
            "encoding_format": "base64",
            "dimensions": pooling.dimensions,
            "normalize": pooling.normalize,
            "truncate_prompt_tokens": -1 if truncate else None,
        }
        data = self._api.embeddings(body)["data"]
        return [array("f", base64.b64decode(each["embedding"])) for each in data]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **_: Any
    ) -> Iterator[StreamChunk]:
        """Yield the pieces of an answer; the last one has the completion.

        Raises:
            PromptTooLong: the prompt exceeds the model's context.
            CallRefused: the server refuses the request for another reason.
            ServerUnreachable: no server answers, or the connection broke.
        """
        model, is_chat = self._model or self.info()["model"], not isinstance(prompt, str)
        path = "/chat/completions" if is_chat else "/completions"
        body = {
            "model": model,
            "messages" if is_chat else "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_sampling_fields(params or SamplingParams()),
        }
        answer, has_reasoned = _Answer(now()), False
        try:
            for event in self._api.stream(path, body):
                chunk, reasoning = answer.take(event)
                if reasoning:
                    self._on_reasoning(reasoning)
                if chunk.text:
                    if has_reasoned:
                        self._on_reasoning("\n")
                    yield chunk
                has_reasoned = bool(reasoning)
        except CallRefused as error:
            if error.reason == CONTEXT_EXCEEDED:
                raise PromptTooLong(str(error)) from None
            raise
        yield answer.end()


class _Answer:
    """Collects the events of an answer, and times them. submitted_at: Unix seconds."""

    def __init__(self, submitted_at: float) -> None:
        self._timings = Timings(submitted_at)
        self._texts: list[str] = []
        self._id = self._finish_reason = ""
        self._usage = Usage(0, 0)

    def take(self, event: dict[str, Any]) -> tuple[StreamChunk, str]:
        """Return the text of an event, and its reasoning."""
        received_at, text, reasoning = now(), "", ""
        self._id = event.get("id") or self._id
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            text += delta.get("content") or delta.get("text") or ""
            reasoning += delta.get("reasoning_content") or ""
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            self._usage = Usage(usage["prompt_tokens"], usage["completion_tokens"], cached)
        if text or reasoning:
            self._timings.token_times.append(received_at)
        self._texts.append(text)
        return StreamChunk(self._id, text, [], [], received_at), reasoning

    def end(self) -> StreamChunk:
        """Return the last piece, which has no text."""
        self._timings.delivered = now()
        self._timings.first_token = next(iter(self._timings.token_times), 0.0)
        completion = Completion(
            self._id, "".join(self._texts), [], self._finish_reason, self._usage, self._timings
        )
        return StreamChunk(self._id, "", [], [], now(), completion)


def _sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that the commands set, by OpenAI's names."""
    fields = {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": params.seed,
    }
    return {name: value for name, value in fields.items() if value is not None}


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


def _error_in(body: str) -> tuple[str, str]:
    """Return message and code of an error's body, or the body in one line."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), str(error.get("code") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return " ".join(body.split())[:300], ""


def _pieces(head: bytes, file: BinaryIO, tail: bytes) -> Iterator[bytes]:
    yield head
    while piece := file.read(PIECE_BYTES):
        yield piece
    yield tail
