"""A client that sends arbitrary frames."""

import os
from typing import Any

import msgpack
import zmq


class RawClient:
    """A DEALER that sends arbitrary frames."""

    def __init__(self, endpoint: str, receive_queue: int = 1000) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, os.urandom(16))
        self.socket.setsockopt(zmq.RCVHWM, receive_queue)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, seconds: float = 20.0) -> list[Any]:
        assert self.socket.poll(int(seconds * 1000)), "no answer"
        message: list[Any] = msgpack.unpackb(self.socket.recv(), strict_map_key=False)
        return message
