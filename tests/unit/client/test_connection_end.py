"""The last words of a server reach a client that has not read for a while."""

import asyncio
import threading
import time
import uuid

import zmq

from quadriga.client.connection import Connection, ConnectionEvents
from quadriga.wire.client import PROTOCOL_VERSION, Ping, Pong, Refused, ServerMessage
from quadriga.wire.client import RefusalInfo as Error
from quadriga.wire.sockets import encode

FLUSH_TIMEOUT_S = 500


def serve(router: "zmq.Socket[bytes]") -> None:
    """Answer a ping, and at the next one say much and leave."""
    client, _ = router.recv_multipart()
    router.send_multipart([client, encode(Pong(PROTOCOL_VERSION, "it", 1 << 24))])
    router.recv_multipart()
    for number in range(FLUSH_TIMEOUT_S):
        router.send_multipart([client, encode(Refused(str(number), Error("failed", "")))])
    router.close(linger=2000)


async def listen(endpoint: str, gone: threading.Thread) -> list[str]:
    heard: list[str] = []

    def take(message: ServerMessage) -> None:
        assert isinstance(message, Refused)
        heard.append(message.request_id)

    interrupted = asyncio.Event()

    def interrupt() -> None:
        heard.append("interrupted")
        interrupted.set()

    events = ConnectionEvents(take, interrupt, lambda: None, lambda why: None)
    connection = Connection(endpoint, uuid.uuid4(), events, reconnect_timeout=5)
    await connection.open(10)
    connection.send(Ping(PROTOCOL_VERSION))
    gone.join(10)
    time.sleep(0.2)  # the client is busy with something else while the connection ends
    await asyncio.wait_for(interrupted.wait(), 10)
    await connection.close(linger_s=0)
    return heard


def test_messages_received_before_a_disconnect_are_handled_before_it() -> None:
    with zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        server = threading.Thread(target=serve, args=[router])
        server.start()
        heard = asyncio.run(listen(f"tcp://127.0.0.1:{port}", server))
    assert heard == [*map(str, range(FLUSH_TIMEOUT_S)), "interrupted"]
