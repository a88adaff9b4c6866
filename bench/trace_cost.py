"""Measure what traces and JSON logs cost: `python -m bench.trace_cost`.

Two servers, one of which logs requests as JSON, generate in turns for 64 streams each: without
traces, with 1 % and with all requests traced and exported, and with JSON logs. The tokens per
second of each turn are compared with those of the turns without anything before and after it, so
that a machine that becomes slower meanwhile changes little.
"""

import argparse
import asyncio
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from bench.client.server import OwnServer
from quadriga.client.async_client import AsyncClient
from quadriga.clock import now
from quadriga.config.server_config import ServerConfig
from quadriga.sampling.params import SamplingParams
from quadriga.tracing.context import started, traceparent_of

PROMPT = "Write down everything that you know about the sea and the ships on it."


class Variant(NamedTuple):
    """What is switched on in a turn. share: of the requests that are traced."""

    name: str
    share: float = 0.0
    has_logs: bool = False


OFF = Variant("off")
VARIANTS = (OFF, Variant("traces 1 %", 0.01), Variant("traces 100 %", 1.0),
            Variant("JSON logs", has_logs=True))  # fmt: skip


class TracedTurn(NamedTuple):
    """Tokens per second, and CPU ms of all processes but the worker for 1,000 tokens."""

    speed: float
    cpu_ms: float


@contextmanager
def sink() -> Iterator[str]:
    """Yield the URL of a collector that reads and forgets."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


async def run_turn(client: AsyncClient, share: float, streams: int, requests: int) -> TracedTurn:
    """Measure one turn of so many streams, each with a few requests one after the other."""
    num_tokens = 0

    async def stream(number: int) -> None:
        nonlocal num_tokens
        for index in range(requests):
            params = SamplingParams(max_new_tokens=32, ignore_eos=True, seed=number)
            is_traced = random.random() < share
            traceparent = traceparent_of(started(sampled=True)) if is_traced else ""
            prompt = f"{number} {index}. {PROMPT}"
            async for chunk in client.stream(prompt, params, traceparent=traceparent):
                num_tokens += len(chunk.token_ids)

    before_s, began_at = await _cpu_seconds(client), now()
    await asyncio.gather(*(stream(number) for number in range(streams)))
    seconds, cpu_s = now() - began_at, await _cpu_seconds(client) - before_s
    return TracedTurn(num_tokens / seconds, 1e6 * cpu_s / num_tokens)


async def _cpu_seconds(client: AsyncClient) -> float:
    pids: dict[str, int] = (await client.info())["pids"]
    times = (psutil.Process(pid).cpu_times() for name, pid in pids.items()
             if not name.startswith("worker_proc"))  # fmt: skip
    return float(sum(time.user + time.system for time in times))


async def measure(arguments: argparse.Namespace) -> None:
    """Measure turns of each variant, and print a table."""
    with ExitStack() as stack:
        flags = {"otlp_endpoint": stack.enter_context(sink()), "trace_sampling_ratio": 0.0}
        base = ServerConfig().replace(model=arguments.model, **flags)
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        plain = stack.enter_context(OwnServer(base))
        logging = base.replace(log_format="json", log_requests=True)
        logged = stack.enter_context(OwnServer(logging, log))
        async with (
            AsyncClient(plain.endpoint, connect_timeout=600.0) as first,
            AsyncClient(logged.endpoint, connect_timeout=600.0) as second,
        ):
            await plain.wait_ready(lambda: first.info(5.0))
            await logged.wait_ready(lambda: second.info(5.0))

            async def turn(variant: Variant) -> TracedTurn:
                client = second if variant.has_logs else first
                return await run_turn(client, variant.share, arguments.streams, arguments.requests)

            await turn(OFF)  # the first ones warm up
            await turn(VARIANTS[-1])
            off = await turn(OFF)
            turns: dict[str, list[TracedTurn]] = {variant.name: [] for variant in VARIANTS}
            shares: dict[str, list[float]] = {variant.name: [] for variant in VARIANTS}
            for _ in range(arguments.turns):
                for variant in VARIANTS:
                    turns[variant.name].append(one := await turn(variant))
                    before, off = off, await turn(OFF)
                    shares[variant.name].append(one.speed / ((before.speed + off.speed) / 2))
            dropped = (await first.info()).get("traces_dropped", 0)
    _print_table(arguments, turns, shares)
    print(f"traces dropped: {dropped}")


def _print_table(
    arguments: argparse.Namespace,
    turns: dict[str, list[TracedTurn]],
    shares: dict[str, list[float]],
) -> None:
    print(
        f"{arguments.streams} streams of {arguments.requests} requests of 32 tokens,"
        f" {arguments.turns} turns"
    )
    print("speed as a share of the turns without anything around; CPU without the worker")
    print(f"{'':>13}{'tokens/s':>10}{'share':>9}{'lowest':>9}{'highest':>9}{'CPU ms/1000':>13}")
    for name, values in shares.items():
        cells = (median(values), min(values), max(values))
        percents = "".join(f"{100 * value:8.1f}%" for value in cells)
        speed = median(turn.speed for turn in turns[name])
        cpu_ms = median(turn.cpu_ms for turn in turns[name])
        print(f"{name:>13}{speed:10.0f}{percents}{cpu_ms:13.1f}")


def main() -> None:
    """Measure servers of this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=3, help="of each stream in a turn")
    parser.add_argument("--turns", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
