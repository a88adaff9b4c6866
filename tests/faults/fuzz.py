"""Send random and mutated frames to the public socket and to every inner decoder.

    python -m tests.faults.fuzz --frames 1000000            # starts a server of a tiny model
    python -m tests.faults.fuzz --frames 100000 --endpoint tcp://127.0.0.1:5555

Most frames are valid messages with replaced fields, or with bytes flipped, cut off or repeated.
Afterwards the server must answer, hold no request and no page, and use no more memory than before.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import psutil

from quadriga.client import Client, SamplingParams
from quadriga.wire.client import Chunk, Chunks, ClientMessage, ServerMessage
from quadriga.wire.packing import pack_ids
from quadriga.wire.to_detok import Delivered, DetokMessage, StepOutput, StreamEnd, StreamStart
from quadriga.wire.to_scheduler import (
    AbortRequest,
    InfoRequest,
    ProgressRequest,
    SchedulerMessage,
    StopFound,
    Submit,
)
from quadriga.wire.worker import (
    FailedRow,
    NewSlot,
    ResultMessage,
    StepPlan,
    StepResult,
    WorkerMessage,
    WorkerReady,
)
from scheduler_proc.journal.file import JournalRecord, TokenRecord
from tests.faults.raw_client import RawClient
from tests.server import is_alive, running_server, settle
from tests.tiny_models import tiny_llama

INNER: dict[str, Any] = {
    "public, to the server": ClientMessage,
    "public, to the client": ServerMessage,
    "scheduler": SchedulerMessage,
    "worker": WorkerMessage,
    "results": ResultMessage,
    "detok": DetokMessage,
    "delivery": Delivered,
    "journal": JournalRecord,
}
_IDS = pack_ids([1, 2, 3])
_CLOSED = StreamEnd(1, b"c", "r", "stop", 2, None, 3, 0, 1.0, 1.0, 1.0, 1.0)
# Valid messages of every inner link.
SAMPLES: list[msgspec.Struct] = [
    Submit(b"c", "r", _IDS, SamplingParams(max_new_tokens=3, seed=1), True, 1.0, 2.0),
    AbortRequest(b"c", "r"),
    StopFound([1, 2]),
    InfoRequest(b"c", "r", {"running": 1, "pids": {"a": 2}}),
    ProgressRequest(b"c", "r", ["a", "b"], ["b"]),
    StepPlan(1, 2, _IDS, _IDS, [NewSlot(1, _IDS, 0, _IDS, 1.0, -1, 1.0, 5)], _IDS, _IDS),
    WorkerReady(10, 16, 4, "float32", "cpu"),
    StepResult(1, _IDS, 1.0, 2.0, failed=[FailedRow(0, "why")]),
    StepOutput(1.0, [StreamStart(1, b"c", "r", True, True, ["x"])], [1, 1, 1], _IDS, [_CLOSED]),
    Chunks([Chunk("r", 0, "text", _IDS, [1.0, 2.0, 3.0])]),
    Delivered(["r"], 5),
    JournalRecord([], [TokenRecord([1, 2, 3], _IDS, 1.0)], [], [], [1]),
]
# After each batch an answer is awaited, so that no queue grows.
BATCH_FRAMES = 500
PARAMS: list[str] = list(SamplingParams.__struct_fields__)
VALUES: list[Callable[[random.Random], Any]] = [
    lambda chosen: chosen.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1]),
    lambda chosen: chosen.choice([0.0, -0.5, 1e308, float("nan"), float("inf")]),
    lambda chosen: chosen.choice([None, True, False]),
    lambda chosen: chosen.randbytes(chosen.randrange(20)),
    lambda chosen: "".join(chr(chosen.randrange(1, 0xD7FF)) for _ in range(chosen.randrange(9))),
    lambda chosen: [chosen.randrange(600) for _ in range(chosen.randrange(9))],
    lambda chosen: {"role": "user", "content": "x"},
    lambda chosen: [{"role": "user", "content": "x"}] * chosen.randrange(4),
    lambda chosen: {chosen.choice(PARAMS): chosen.randrange(-2, 5)},
    lambda chosen: [[[]]] * chosen.randrange(4),
]


def messages(chosen: random.Random) -> list[list[Any]]:
    """Return a valid message of every kind that a client may send, as lists."""
    name = f"r{chosen.randrange(50)}"
    ids = b"".join(chosen.randrange(512).to_bytes(4, "little") for _ in range(5))
    params = {"max_new_tokens": chosen.randrange(1, 4), "temperature": 0.0}
    return [
        ["generate", 1, name, "some text", params],
        ["generate", 1, name, "", params, False, None, ids, 3, None, 5.0, {}, True, True],
        ["generate", 1, name, [{"role": "user", "content": "hi"}], params],
        ["abort", 1, chosen.choice([name, ""])],
        ["ping", 1],
        ["get_info", 1, name],
        ["tokenize", 1, name, "some text"],
        ["detokenize", 1, name, ids],
        ["flush_cache", 1, name],
        ["get_progress", 1, name, [name, "r1"]],
    ]


def frame(chosen: random.Random, valid: list[list[Any]]) -> bytes:
    """Return a mutated message, or random bytes."""
    kind = chosen.randrange(10)
    if kind == 0:
        return chosen.randbytes(chosen.randrange(60))
    message = list(chosen.choice(valid))
    if kind <= 5:
        _mutate_fields(message, chosen)
    data: bytes = msgpack.packb(message, use_bin_type=True, unicode_errors="surrogatepass")
    return data if kind <= 6 else _mutate_bytes(bytearray(data), chosen)


def _mutate_fields(message: list[Any], chosen: random.Random) -> None:
    for _ in range(chosen.randrange(1, 3)):
        index = chosen.randrange(len(message) + 1)
        value = chosen.choice(VALUES)(chosen)
        if index == len(message):
            message.append(value)
        elif isinstance(message[index], dict) and chosen.random() < 0.7:
            message[index] = {**message[index], chosen.choice(PARAMS): value}
        else:
            message[index] = value
    if len(message) > 4 and isinstance(message[4], dict) and "max_new_tokens" not in message[4]:
        message[4] = {**message[4], "max_new_tokens": 2}


def _mutate_bytes(data: bytearray, chosen: random.Random) -> bytes:
    for _ in range(chosen.randrange(1, 4)):
        index = chosen.randrange(len(data)) if data else 0
        match chosen.randrange(4):
            case 0 if data:
                data[index] ^= 1 << chosen.randrange(8)
            case 1:
                del data[index:]
            case 2:
                data[index:index] = chosen.randbytes(chosen.randrange(8))
            case _:
                data += data[index:]
    return bytes(data)


def fuzz_public(endpoint: str, frames: int, seed: int = 1) -> Iterator[int]:
    """Send `frames` frames; yield the number sent so far after each batch."""
    chosen = random.Random(seed)
    abort = msgpack.packb(["abort", 1, ""])
    with RawClient(endpoint) as hostile:
        for first in range(0, frames, BATCH_FRAMES):
            for _ in range(min(BATCH_FRAMES, frames - first)):
                count = 1 + (chosen.random() < 0.02)
                hostile.send(*(frame(chosen, messages(chosen)) for _ in range(count)))
            hostile.send(abort)
            mark = f"all before {first + BATCH_FRAMES}"
            question = msgpack.packb(["get_info", 1, mark])
            hostile.send(question)
            while (answer := hostile.receive())[0] != "info" or answer[1] != mark:
                if answer[0] == "refused" and answer[1] == mark:  # too many get_info are open
                    time.sleep(0.01)
                    hostile.send(question)
            yield first + BATCH_FRAMES


def fuzz_decoders(frames: int, seed: int = 1) -> None:
    """Check that a decoder returns a message or raises DecodeError for every frame."""
    for name, kind in INNER.items():
        chosen, decode = random.Random(seed), msgspec.msgpack.Decoder(kind).decode
        samples = [msgspec.to_builtins(sample, builtin_types=[bytes]) for sample in SAMPLES]
        valid = messages(chosen) + samples
        refused = 0
        for _ in range(frames):
            try:
                decode(frame(chosen, valid))
            except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                refused += 1
        print(f"decoder {name}: {frames} frames, {refused} refused")


def sizes(pids: dict[str, int]) -> dict[str, float]:
    """Return the resident MiB of each process."""
    return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids.items()}


def fuzz_server(endpoint: str, frames: int) -> None:
    before = settle(endpoint)
    pids = before["pids"]
    first, began = sizes(pids), time.monotonic()
    for sent in fuzz_public(endpoint, frames):
        if sent == max(BATCH_FRAMES, frames // 5 // BATCH_FRAMES * BATCH_FRAMES):
            first = sizes(pids)
        missing = [name for name, pid in pids.items() if not is_alive(pid)]
        assert not missing, f"died within the last {BATCH_FRAMES} of {sent} frames: {missing}"
    seconds = time.monotonic() - began
    after = settle(endpoint)
    with Client(endpoint) as client:
        assert client.generate("some text", SamplingParams(max_new_tokens=2)).token_ids
    refused = after["refused"] - before["refused"]
    print(f"public socket: {frames} frames in {seconds:.0f} s, {refused} refused and counted")
    for name, size in sizes(pids).items():
        print(f"  {name}: {first[name]:.1f} MiB after a fifth, {size:.1f} MiB at the end")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.fuzz")
    parser.add_argument("--frames", type=int, default=100_000, help="frames for the public socket")
    parser.add_argument("--inner-frames", type=int, default=100_000, help="frames for each decoder")
    parser.add_argument("--endpoint", help="endpoint of a running server (default: start one)")
    arguments = parser.parse_args()
    fuzz_decoders(arguments.inner_frames)
    if arguments.endpoint:
        fuzz_server(arguments.endpoint, arguments.frames)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory) / "model")
        flags = ["--model", str(model), "--max-total-tokens", "8192", "--worker-threads", "1"]
        with running_server(Path(directory) / "log", *flags) as server:
            try:
                fuzz_server(server.endpoint, arguments.frames)
            except BaseException:
                print(server.log.read_text())
                raise


if __name__ == "__main__":
    main()
