"""Measure pings while another client sends the most expensive messages.

    python -m tests.faults.latency              # starts a server of a tiny model

A ping is answered by the event loop of the tokenizer process, so that its round trip shows how long
that loop was busy with something else. Prints the median, p99 and maximum for each hostile input.
"""

import argparse
import itertools
import json
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import msgpack

from quadriga.wire.packing import pack_ids
from tests.faults.raw_client import RawClient
from tests.server import running_server
from tests.tiny_models import tiny_llama

MIB = 1 << 20
PARAMS = {"max_new_tokens": 2}
PING = msgpack.packb(["ping", 1])


def chat(*messages: dict[str, Any], **options: Any) -> list[Any]:
    return ["generate", 1, "", list(messages), PARAMS, True, None, None, 0, None, None, options]


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "f", "arguments": {"a": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


WORDS = "a b " * (15 * MIB // 4)
REGEX = "(?:ab?c*d+|[^x]){1000}"
# The number of messages, and a function that makes one; its third field becomes an id.
INPUTS: dict[str, tuple[int, Callable[[], list[Any]]]] = {
    "a role of 15 MiB": (4, lambda: chat({"role": WORDS, "content": ""})),
    "700,000 turns": (4, lambda: chat(*[{"role": "", "content": ""}] * 700_000)),
    "a text of 15 MiB": (16, lambda: ["generate", 1, "", WORDS, PARAMS]),
    "a text of 7 MiB": (8, lambda: ["generate", 1, "", WORDS[: 7 * MIB], PARAMS]),
    "to tokenize: 15 MiB": (16, lambda: ["tokenize", 1, "", WORDS]),
    "to tokenize: 7 MiB": (8, lambda: ["tokenize", 1, "", WORDS[: 7 * MIB]]),
    "to detokenize: 3 million ids": (4, lambda: ["detokenize", 1, "", pack_ids([7]) * 3_000_000]),
    "3 million token ids": (
        16,
        lambda: ["generate", 1, "", "", PARAMS, True, None, pack_ids([7]) * 3_000_000],
    ),
    "a call's arguments of 15 MiB": (4, lambda: chat(call(WORDS))),
    "tools of 8 MiB": (4, lambda: chat(tools=[{"f": json.dumps([])}] * (8 * MIB // 6))),
    "four expensive stop_regex": (
        500,
        lambda: ["generate", 1, "", "x", {**PARAMS, "stop_regex": [REGEX] * 4}],
    ),
    "get_info, 10,000 times": (10_000, lambda: ["get_info", 1, ""]),
    "get_info, 50,000 times": (50_000, lambda: ["get_info", 1, ""]),
    "flush_cache, 50,000 times": (50_000, lambda: ["flush_cache", 1, ""]),
    "junk of 16 MiB": (16, lambda: [WORDS]),
}


def ping_until_stdin_ends(endpoint: str) -> None:
    """Ping the server without a pause until stdin ends; print the round trips' seconds as JSON."""
    round_trips: list[float] = []
    with RawClient(endpoint) as client:
        while not select.select([sys.stdin], [], [], 0)[0]:
            sent_at = time.perf_counter()
            client.send(PING)
            while client.receive(60)[0] != "pong":
                continue
            round_trips.append(time.perf_counter() - sent_at)
            if len(round_trips) == 1:
                print("pinging", flush=True)
    print(json.dumps(round_trips))


@contextmanager
def pings(endpoint: str) -> Iterator[list[float]]:
    """Ping the server from another process as long as the block runs.

    The yielded list has the seconds of each round trip after the block.
    """
    round_trips: list[float] = []
    command = [sys.executable, "-m", "tests.faults.latency", "--ping", endpoint]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"pinging\n"
    try:
        yield round_trips
        answer, _ = process.communicate(timeout=60)
        round_trips += json.loads(answer)
    finally:
        process.kill()
        process.wait()


def attack(endpoint: str, name: str, num_messages: int | None = None) -> list[float]:
    """Send a hostile input and wait for the answers; return the round trips of another client."""
    count, make = INPUTS[name]
    count = num_messages or count
    message = make()
    frames: dict[str, bytes] = {}
    for number in range(min(count, 16)):
        if len(message) > 1:
            message[2] = f"h{number}"
        frames[f"h{number}"] = msgpack.packb(message)
    # Messages without an id are answered before the last one, which has one.
    waited_for = {"last", *(frames if len(message) > 1 else ())}
    with RawClient(endpoint, receive_queue=0) as hostile, pings(endpoint) as round_trips:
        for frame in itertools.islice(itertools.cycle(frames.values()), count):
            hostile.send(frame)
        last = msgpack.packb(["generate", 1, "last", "x", PARAMS])
        hostile.send(last)
        while waited_for:
            answer = hostile.receive(120)
            waited_for -= _answered(answer)
            if answer[0] == "server_gone":  # it has read its answers too slowly
                waited_for = {"last"}
                hostile.send(last)
    return round_trips


def _answered(answer: list[Any]) -> set[str]:
    """Return the ids of the messages whose answer ends with this one."""
    if answer[0] == "chunks":
        return {chunk[0] for chunk in answer[1] if chunk[5]}
    return {answer[1]} if isinstance(answer[1], str) else set()


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults.latency")
    parser.add_argument("--ping", metavar="ENDPOINT", help="only ping, until stdin ends")
    arguments = parser.parse_args()
    if arguments.ping:
        ping_until_stdin_ends(arguments.ping)
        return
    with tempfile.TemporaryDirectory() as directory:
        model = tiny_llama(Path(directory) / "model")
        with running_server(
            Path(directory) / "log", "--model", str(model), "--worker-threads", "1"
        ) as server:
            print(f"{'round trip of a ping, ms':34}   p50    p99    max")
            for name in INPUTS:
                ms = [1000 * seconds for seconds in attack(server.endpoint, name)]
                cuts = quantiles(ms, n=100, method="inclusive")
                print(f"{name:34} {cuts[49]:5.1f}  {cuts[98]:5.1f}  {max(ms):5.1f}")


if __name__ == "__main__":
    main()
