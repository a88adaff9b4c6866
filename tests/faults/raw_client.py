"""A client without manners."""

import os

import msgpack
import zmq


class RawClient:
    """A DEALER that sends whatever it likes."""

    def __init__(self, endpoint: str, receive_queue: int = 1000) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, os.urandom(16))
        self.socket.rcvhwm = receive_queue
        self.socket.sndhwm = 0
        self.socket.linger = 0
        self.socket.connect(endpoint)

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, seconds: float = 20.0) -> list:  # type: ignore[type-arg]
        assert self.socket.poll(int(seconds * 1000)), "no answer"
        return msgpack.unpackb(self.socket.recv(), strict_map_key=False)  # type: ignore[no-any-return]
