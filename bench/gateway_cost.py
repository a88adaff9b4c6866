"""Measure the gateway's CPU time for streamed tokens: `python -m bench.gateway_cost`.

The gateway runs as a process of its own. Behind it stands a server without a model, which answers
each request with one token of a given text at a time. Some streams of each kind of answer run at
once, and the gateway's CPU time for 1,000 tokens is printed: of the parser and everything else. In
the last kind, steps are so short that several tokens of a stream arrive together.
`"old: @DIR" "new: "` compares the gateways of two checkouts, in turns.
"""

import asyncio
import contextlib
import operator
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.cli.command import EXIT_OK, command_parser, run_command
from bench.client.resources import cpu_seconds
from bench.client.server import free_port
from bench.turns import VARIANTS_HELP, Column, Turns, Variant, variant_of
from quadriga.clock import now
from quadriga.errors import ServerFailed
from quadriga.server.answer_format import KNOWN_FORMATS, to_info
from quadriga.wire import packing, sockets
from quadriga.wire.async_sockets import AsyncPort
from quadriga.wire.client import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Accepted,
    Chunk,
    Chunks,
    ClientMessage,
    End,
    Generate,
    GetInfo,
    Info,
    Ping,
    Pong,
    StageTimes,
    Usage,
)

NUM_STREAMS, NUM_TOKENS, NUM_TURNS = 32, 250, 5
STEP_S, SHORT_STEP_S = 0.01, 0.0005
PROSE = "The quick brown fox jumps over the lazy dog and runs on through the wet grass . "
TOOL = {"type": "function", "function": {"name": "run", "parameters": {
    "type": "object", "properties": {"code": {"type": "string"}}}}}  # fmt: skip
CALL_BEGIN = '<tool_call>\n{"name": "run", "arguments": {"code": "'
# The answers, further fields of their requests, and the time of a step.
KINDS: dict[str, tuple[str, dict[str, Any], float]] = {
    "plain": ("", {}, STEP_S),
    "with tools": ("", {"tools": [TOOL]}, STEP_S),
    "reasoning": ("<think>\n", {}, STEP_S),
    "a call": (CALL_BEGIN, {"tools": [TOOL]}, STEP_S),
    "plain, fast": ("", {}, SHORT_STEP_S),
}
_decode = msgspec.msgpack.Decoder(ClientMessage).decode
_encode = msgspec.msgpack.encode


def answer(begin: str) -> list[str]:
    """Return the tokens of an answer: words behind the given begin."""
    words = (PROSE * NUM_TOKENS).split(" ")
    begin_tokens = begin.split(" ") if begin else []
    return [f"{word} " for word in [*begin_tokens, *words]][:NUM_TOKENS]


class TextServer:
    """A server that answers every request with the tokens of one text.

    Attributes:
        tokens: the text.
        step_s: the time between two tokens of a request.
    """

    def __init__(self, endpoint: str) -> None:
        self.tokens: list[str] = []
        self.step_s = STEP_S
        self._port = AsyncPort(sockets.bind_public(endpoint), self._take)
        self._open: dict[str, tuple[bytes, int, int]] = {}

    def _take(self, frames: list[bytes]) -> None:
        client, frame = frames
        match message := _decode(frame):
            case Ping():
                self._send(client, Pong(PROTOCOL_VERSION, "bench", MAX_FRAME_BYTES))
            case GetInfo():
                self._send(client, Info(message.request_id, _info()))
            case Generate():
                if message.acknowledge:
                    self._send(client, Accepted(message.request_id, 1))
                self._open[message.request_id] = client, 0, 0

    def close(self) -> None:
        """Close the socket."""
        self._port.close(0)

    async def serve(self) -> None:
        """Send the next token of each open request, step by step, until the task is cancelled."""
        while True:
            await asyncio.sleep(self.step_s)
            of_client: dict[bytes, list[Chunk]] = {}
            for name, (client, number, offset) in list(self._open.items()):
                text, is_last = self.tokens[number], number + 1 == len(self.tokens)
                chunk = Chunk(
                    name, offset, text, packing.pack_ids([1]), [now()], _end() if is_last else None
                )
                of_client.setdefault(client, []).append(chunk)
                if is_last:
                    del self._open[name]
                else:
                    self._open[name] = client, number + 1, offset + len(text)
            for client, chunks in of_client.items():
                self._send(client, Chunks(chunks))

    def _send(self, client: bytes, message: msgspec.Struct) -> None:
        self._port.send(client, _encode(message))


def _end() -> End:
    at = now()
    return End("stop", Usage(1, NUM_TOKENS), StageTimes(at, at, at, at, at))


def _info() -> dict[str, Any]:
    return {
        "ready": True,
        "protocol": PROTOCOL_VERSION,
        "context_length": 8192,
        "chat": True,
        "answer_format": to_info(KNOWN_FORMATS["qwen3"]),
        "tool_format": "hermes",  # for gateways before answer_format
        "pids": {},
    }


@contextlib.asynccontextmanager
async def running_gateway(
    checkout: Path, endpoint: str, flags: Sequence[str]
) -> AsyncIterator[tuple[str, int]]:
    """Yield the URL and the process id of a checkout's gateway."""
    port = free_port()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "http_proc", "--run-dir", run_dir]
        command += ["--endpoint", endpoint, "--port", str(port)]
        command += [
            "--model",
            "bench",
            "--served-model-name",
            "bench",
            "--log-level",
            "warning",
            *flags,
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        process = subprocess.Popen(command, cwd=checkout, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(url, process)
            yield url, process.pid
        finally:
            process.terminate()
            process.wait(10)


async def _until_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            if process.poll() is not None:
                raise ServerFailed("the gateway did not start")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


async def ms_per_1000_tokens(url: str, pid: int, fields: dict[str, Any]) -> float:
    """Return the gateway's CPU time for 1,000 tokens of some streams, in ms."""
    body = {"messages": [{"role": "user", "content": "Go"}], "stream": True, **fields}

    async def read(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            data = await response.read()
        if not data.endswith(b"data: [DONE]\n\n") or b'"error"' in data:
            raise ServerFailed(f"a stream did not end: {data[-300:]!r}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before = cpu_seconds({"gateway": pid})["gateway"]
        await asyncio.gather(*(read(session) for _ in range(NUM_STREAMS)))
        after = cpu_seconds({"gateway": pid})["gateway"]
        if before is None or after is None:
            raise ServerFailed("the gateway has ended")
        return 1e6 * (after - before) / (NUM_STREAMS * NUM_TOKENS)


async def measure(variants: list[Variant]) -> Turns[Mapping[str, float]]:
    """Measure each kind of answer with each variant's gateway, in turns."""
    turns: Turns[Mapping[str, float]] = Turns([variant.name for variant in variants])
    gateways: dict[str, tuple[TextServer, str, int]] = {}

    async def turn(name: str) -> dict[str, float]:
        server, url, pid = gateways[name]
        figures = {}
        for kind, (begin, fields, step_s) in KINDS.items():
            server.tokens, server.step_s = answer(begin), step_s
            figures[kind] = await ms_per_1000_tokens(url, pid, fields)
        return figures

    async with contextlib.AsyncExitStack() as stack:
        for variant in variants:
            endpoint = f"tcp://127.0.0.1:{free_port()}"
            server = TextServer(endpoint)
            stack.callback(server.close)
            stack.callback(asyncio.create_task(server.serve()).cancel)
            gateway = running_gateway(variant.checkout, endpoint, variant.flags)
            gateways[variant.name] = server, *(await stack.enter_async_context(gateway))
            await turn(variant.name)
        for _, name in turns.order(NUM_TURNS):
            turns.results[name].append(await turn(name))
    return turns


def main() -> int:
    """Measure the gateways of the command line, and return the exit code."""
    parser = command_parser("bench.gateway_cost", __doc__)
    parser.add_argument("variants", nargs="*", default=["this: "], help=VARIANTS_HELP)
    arguments = parser.parse_args()

    def work() -> int:
        turns = asyncio.run(measure([variant_of(text) for text in arguments.variants]))
        columns: list[Column[Mapping[str, float]]] = [
            Column(kind, operator.itemgetter(kind), 1, has_ratio=True) for kind in KINDS
        ]
        print(turns.table(columns, "CPU ms of the gateway for 1,000 tokens"))
        return EXIT_OK

    return run_command("bench.gateway_cost", work)


if __name__ == "__main__":
    sys.exit(main())
