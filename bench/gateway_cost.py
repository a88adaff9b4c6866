"""Measure the gateway's CPU time for streamed tokens: `python -m bench.gateway_cost`.

The gateway runs as a process of its own. Behind it stands a server without a model, which answers
each request with one token of a given text at a time. Some streams of each kind of answer run at
once, and the gateway's CPU time for 1,000 tokens is printed: of the parser and everything else. In
the last kind, steps are so short that several tokens of a stream arrive together.
With --checkout the gateway of another checkout is measured, in turns with this one's.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.cli.command import command_parser
from bench.client.server import free_port
from quadriga.clock import now
from quadriga.server.answer_format import KNOWN_FORMATS, to_info
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
from quadriga.wire.packing import pack_ids
from quadriga.wire.sockets import bind_public

ROOT = Path(__file__).resolve().parents[1]
NUM_STREAMS, NUM_TOKENS, NUM_REPETITIONS = 32, 250, 5
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
        self._port = AsyncPort(bind_public(endpoint), self._take)
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
                    name, offset, text, pack_ids([1]), [now()], _end() if is_last else None
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
async def running_gateway(checkout: Path, endpoint: str) -> AsyncIterator[tuple[str, int]]:
    """Yield the URL and the process id of a checkout's gateway."""
    port = free_port()
    with tempfile.TemporaryDirectory() as run_dir:
        command = [sys.executable, "-m", "http_proc", "--run-dir", run_dir]
        command += ["--endpoint", endpoint, "--port", str(port)]
        command += ["--model", "bench", "--served-model-name", "bench", "--log-level", "warning"]
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
                raise SystemExit("the gateway did not start")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ms_per_1000_tokens(url: str, pid: int, fields: dict[str, Any]) -> float:
    """Return the gateway's CPU time for 1,000 tokens of some streams, in ms."""
    body = {"messages": [{"role": "user", "content": "Go"}], "stream": True, **fields}

    async def read(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            data = await response.read()
        if not data.endswith(b"data: [DONE]\n\n") or b'"error"' in data:
            raise SystemExit(f"a stream did not end: {data[-300:]!r}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        before = cpu_seconds(pid)
        await asyncio.gather(*(read(session) for _ in range(NUM_STREAMS)))
        return 1e6 * (cpu_seconds(pid) - before) / (NUM_STREAMS * NUM_TOKENS)


async def measure(checkouts: list[Path]) -> None:
    """Measure each kind of answer with each checkout's gateway, in turns, and print a table."""
    servers: list[TextServer] = []
    figures: dict[tuple[str, int], list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        gateways = []
        for checkout in checkouts:
            endpoint = f"tcp://127.0.0.1:{free_port()}"
            servers.append(server := TextServer(endpoint))
            stack.callback(server.close)
            task = asyncio.create_task(server.serve())
            stack.callback(task.cancel)
            gateways.append(await stack.enter_async_context(running_gateway(checkout, endpoint)))
        for repetition in range(NUM_REPETITIONS + 1):
            for kind, (begin, fields, step_s) in KINDS.items():
                for number, (url, pid) in enumerate(gateways):
                    servers[number].tokens, servers[number].step_s = answer(begin), step_s
                    figure = await ms_per_1000_tokens(url, pid, fields)
                    if repetition:  # the first one warms up
                        figures.setdefault((kind, number), []).append(figure)
    print("CPU ms of the gateway for 1,000 tokens: lowest and median")
    for number, checkout in enumerate(checkouts):
        print(checkout)
        for kind in KINDS:
            values = sorted(figures[kind, number])
            print(f"  {kind:12}{values[0]:8.1f}{values[len(values) // 2]:8.1f}")


def main() -> None:
    """Measure the gateway of this checkout, and of another one."""
    parser = command_parser("bench.gateway_cost", __doc__)
    parser.add_argument("--checkout", type=Path, help="directory of another checkout")
    other = parser.parse_args().checkout
    asyncio.run(measure([*([other.resolve()] if other else []), ROOT]))


if __name__ == "__main__":
    main()
