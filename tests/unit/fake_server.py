"""A frontend on a real socket that answers without a ring."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from bench.client.server import free_port
from quadriga.clock import now
from quadriga.wire import sockets
from quadriga.wire.client import (
    PROTOCOL_VERSION,
    Abort,
    Chunk,
    Chunks,
    ClientMessage,
    Generate,
    GetInfo,
    Info,
    Ping,
    Pong,
    RefusalInfo,
    Refused,
    Replay,
)
from quadriga.wire.curve import SERVER, load_pair
from tests.unit.public_messages import make_chunk, make_end


class FakeServer(threading.Thread):
    """A thread that answers every prompt with two tokens.

    A prompt with the word "refuse" is refused, "silent" is not answered, and "endless" gets two
    tokens per iteration until its client aborts it. With `keys`, a server's directory, only clients
    with its public key are answered.
    """

    def __init__(self, endpoint: str, keys: Path | None = None) -> None:
        super().__init__(daemon=True)
        self.endpoint = endpoint
        self.requests: list[Generate] = []
        self.info = {"model": "fake", "vocab_size": 500, "ready": True}
        self.aborts = 0
        self.clients: set[bytes] = set()
        self.stopping = False
        self._keys = keys
        self._endless: dict[bytes, Chunk] = {}
        self._socket = sockets.bind_public(endpoint, self._prepare)

    def _prepare(self, socket: "zmq.Socket[bytes]") -> None:
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = load_pair(self._keys, SERVER)

    def run(self) -> None:
        decode = msgspec.msgpack.Decoder(ClientMessage).decode
        while not self.stopping:
            if self._socket.poll(20):
                client, frame = self._socket.recv_multipart()
                self.clients.add(client)
                message = decode(frame)
                answer = self._answer(message)
                if answer is not None:
                    self._socket.send_multipart([client, sockets.encode(answer)])
                if isinstance(message, Abort):
                    self._endless.pop(client, None)
                elif isinstance(message, Generate) and "endless" in str(message.prompt):
                    self._endless[client] = make_chunk(message.request_id, 0, "ab", [1, 2], at=0.0)
            for client, chunk in self._endless.items():
                self._socket.send_multipart([client, sockets.encode(Chunks([chunk]))])
                self._endless[client] = msgspec.structs.replace(
                    chunk, text_offset=chunk.text_offset + 2
                )
        self._socket.close(linger=0)

    def _answer(self, message: ClientMessage) -> msgspec.Struct | None:
        match message:
            case Ping():
                return Pong(PROTOCOL_VERSION, "fake", 2**20)
            case GetInfo():
                return Info(message.request_id, self.info)
            case Abort():
                self.aborts += 1
                return None
            case Generate():
                self.requests.append(message)
                return self._complete(message)
            case _:
                raise AssertionError(f"unexpected message {message}")

    def _complete(self, request: Generate) -> msgspec.Struct | None:
        if any(word in str(request.prompt) for word in ("silent", "endless")):
            return None
        if "refuse" in str(request.prompt):
            return Refused(request.request_id, RefusalInfo("queue_full", "no room"))
        moment = now()
        end = make_end(2, "length", num_prompt_tokens=4, at=moment)
        chunks = [make_chunk(request.request_id, 0, "ab", [1, 2], end, at=moment)]
        return Replay(chunks) if request.resent else Chunks(chunks)


@contextmanager
def running_fake_server(keys: Path | None = None) -> Iterator[FakeServer]:
    """Run a FakeServer at a free port until the block ends."""
    server = FakeServer(f"tcp://127.0.0.1:{free_port()}", keys)
    server.start()
    try:
        yield server
    finally:
        server.stopping = True
        server.join()
