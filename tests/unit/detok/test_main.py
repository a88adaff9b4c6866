"""The detokenizer as a process of its own, with real sockets and nothing else running."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from quadriga.wire.client import (
    ErrorInfo,
    Info,
    ProgressAnswer,
    RequestProgress,
    RequestState,
    ServerMessage,
)
from quadriga.wire.links import Endpoints
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import encode
from quadriga.wire.to_detok import (
    Delivered,
    Drained,
    HandedBack,
    InfoReply,
    ProgressReply,
    ReplicaNews,
    StepOutput,
    StopDetok,
    StreamEnd,
    StreamStart,
)
from quadriga.wire.to_scheduler import CLIENT_LOST, DetokReady, SchedulerMessage, StopFound
from tests.unit.tiny_gguf import TOKENS, write_tiny_gguf

TIMEOUT_MS = 60_000

Ring = tuple[dict[str, "zmq.Socket[bytes]"], "subprocess.Popen[bytes]"]


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    """Yield sockets in the place of the detokenizer's neighbours, and the process itself."""
    with tempfile.TemporaryDirectory(prefix="q-") as run_dir, zmq.Context() as context:
        endpoints = Endpoints(Path(run_dir))
        neighbours = {
            "delivery": context.socket(zmq.PULL),
            "scheduler": context.socket(zmq.PULL),
            "detok": context.socket(zmq.PUSH),
        }
        neighbours["delivery"].bind(endpoints.delivery)
        neighbours["scheduler"].bind(endpoints.scheduler)
        neighbours["detok"].connect(endpoints.detok)
        for socket in neighbours.values():
            socket.linger, socket.rcvtimeo = 0, TIMEOUT_MS
        model = write_tiny_gguf(tmp_path / "tiny.gguf")
        command = [sys.executable, "-m", "detok_proc", "--run-dir", run_dir, "--model", str(model)]
        environment = {"PATH": "/usr/bin:/bin", "QUADRIGA_CACHE": str(tmp_path / "cache")}
        process = subprocess.Popen(command, env=environment)
        yield neighbours, process
        process.kill()
        process.wait()
        for socket in neighbours.values():
            socket.close()


def receive(socket: "zmq.Socket[bytes]") -> tuple[bytes, Any]:
    """Return (the client's address, the public message)."""
    return receive_with_ends(socket)[:2]


def receive_with_ends(socket: "zmq.Socket[bytes]") -> tuple[bytes, Any, dict[int, int]]:
    """Return the same, and the placements of the ends that have come by now."""
    client, frame, delivered = socket.recv_multipart()
    message = msgspec.msgpack.decode(frame, type=ServerMessage)
    return client, message, msgspec.msgpack.decode(delivered, type=Delivered).settled


def ids(*tokens: str) -> bytes:
    return pack_ids(TOKENS.index(token) for token in tokens)


def test_a_request_a_stop_string_an_info_and_the_end(ring: Ring) -> None:
    neighbours, process = ring
    hello = msgspec.msgpack.decode(neighbours["scheduler"].recv(), type=SchedulerMessage)
    assert isinstance(hello, DetokReady)
    session = hello.session
    opened = [
        StreamStart(1, b"me", "a", True, True, ["b"]),
        StreamStart(2, b"you", "b", True, True, []),
    ]
    close = StreamEnd(1, b"me", "a", "stop", None, None, 5, 0, 1.0, 1.0, 1.0, 1.0)
    lost = StreamEnd(
        3, b"gone", "c", "abort", None, ErrorInfo(CLIENT_LOST, "why"), 5, 0, 1.0, 1.0, 1.0, 1.0
    )
    info = Info("i", {"running": 1})
    progress = ProgressAnswer("p", [RequestProgress(RequestState.QUEUED, 7, 12.5)])
    for message in (
        StepOutput(0.5, [], [], b"", [close], session=session - 1),  # for one that died
        StepOutput(1.0, opened, [1, 2], ids("a", "Ġab"), [], session=session),
        StepOutput(2.0, [], [1], ids("ab"), [], session=session),
        StepOutput(3.0, [], [], b"", [close], session=session),
        StepOutput(3.0, [], [], b"", [lost], session=session),
        InfoReply(b"me", info),
        ProgressReply(b"me", progress),
        Drained(),
        HandedBack(4, [2]),
        StepOutput(4.0, [], [2], ids("ab"), [], session=session),  # a step that was in flight
        StopDetok(),
    ):
        neighbours["detok"].send(encode(message))

    delivery = neighbours["delivery"]
    first = dict(receive(delivery) for _ in range(2))
    assert first[b"me"].chunks[0].text == "a"
    assert first[b"you"].chunks[0].text == " ab"
    client, second = receive(delivery)
    assert (client, second.chunks[0].text) == (b"me", "a")
    stop = msgspec.msgpack.decode(neighbours["scheduler"].recv(), type=SchedulerMessage)
    assert stop == StopFound([1])
    _, third, settled = receive_with_ends(delivery)
    assert settled == {1: 0}
    end = third.chunks[0].end
    assert (end.finish_reason, end.matched_stop) == ("stop", "b")
    client, nothing, delivered = delivery.recv_multipart()
    assert (client, nothing) == (b"gone", b"")
    facts = msgspec.msgpack.decode(delivered, type=Delivered)
    assert (facts.ended, facts.settled, facts.lost) == (["c"], {3: 0}, True)
    assert receive(delivery) == (b"me", info)
    assert receive(delivery) == (b"me", progress)
    assert delivery.recv_multipart() == [b"", b"", b""]
    assert delivery.recv_multipart() == [b"", encode(HandedBack(4)), b""]
    assert process.wait(timeout=30) == 0
    assert delivery.poll(0) == 0


def test_the_choices_of_a_request_end_by_their_indexes(ring: Ring) -> None:
    neighbours, _ = ring
    hello = msgspec.msgpack.decode(neighbours["scheduler"].recv(), type=SchedulerMessage)
    assert isinstance(hello, DetokReady)
    opened = [StreamStart(seq, b"me", "a", True, True, [], index=seq - 1) for seq in (1, 2)]
    closed = [
        StreamEnd(seq, b"me", "a", "stop", None, None, 5, 0, 1.0, 1.0, 1.0, 1.0, index=seq - 1)
        for seq in (1, 2)
    ]
    output = StepOutput(
        1.0, opened, [1, 2], ids("a", "a"), closed, session=hello.session, news=ReplicaNews()
    )
    neighbours["detok"].send(encode(output))
    while True:
        client, _, frame = neighbours["delivery"].recv_multipart()
        if client:
            break
    delivered = msgspec.msgpack.decode(frame, type=Delivered)
    assert (delivered.ended, delivered.indexes) == (["a", "a"], [0, 1])
