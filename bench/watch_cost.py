"""Measure what it costs to look at a server: `python -m bench.watch_cost`.

Servers generate for 64 streams in turns: without anything, with a page open, with a hundred, with
traces of 1 % and of all requests that are exported, with JSON logs, and with traces switched on of
which none is sampled. The tokens per second of each turn are compared with those of the turns
without anything around it, so that a machine that becomes slower meanwhile changes little. It
checks, too, that the spans of each traced request add up to its time.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import NamedTuple

import aiohttp
import psutil

from bench.cli.command import command_parser
from bench.client.server import OwnServer, free_port
from quadriga.client.async_client import AsyncClient
from quadriga.clock import now
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.tracing.context import started, traceparent_of
from quadriga.wire.client import MAX_TRACE_IDS

PROMPT = "Write down everything that you know about the sea and the ships on it."
NUM_TOKENS = 32
PLAIN, TRACED, LOGGED = "plain", "traced", "logged"


class Watching(NamedTuple):
    """What is switched on in a turn.

    Attributes:
        server: which of the servers generates.
        share: of the requests that are traced.
        num_pages: views of GET /v1/live that are open.
    """

    name: str
    server: str = PLAIN
    share: float = 0.0
    num_pages: int = 0


OFF = Watching("off")
WATCHINGS = (
    OFF,
    Watching("traces, none sampled", TRACED),
    Watching("traces 1 %", TRACED, 0.01),
    Watching("traces 100 %", TRACED, 1.0),
    Watching("JSON logs", LOGGED),
    Watching("page open", num_pages=1),
    Watching("100 pages open", num_pages=100),
)


class WatchedTurn(NamedTuple):
    """Tokens per second, and CPU ms of all processes but the worker for 1,000 tokens.

    The CPU time says more than the speed on a machine that has other work.
    """

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


@asynccontextmanager
async def pages(url: str, num_pages: int) -> AsyncIterator[None]:
    """Keep so many live views open in a `with` block, and read all that they are sent."""

    async def read(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/v1/live") as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        readers = [asyncio.create_task(read(session)) for _ in range(num_pages)]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            if readers:
                await asyncio.wait(readers)


class WatchedServer:
    """A server under a load of streams.

    Args:
        client: sends the load.
        url: of the gateway.
        num_streams: that generate at one time.
        num_requests: of each stream in a turn, one after the other.

    Attributes:
        traced_ids: ids of the traced requests of the last turn.
    """

    def __init__(self, client: AsyncClient, url: str, num_streams: int, num_requests: int) -> None:
        self.client = client
        self._url = url
        self._num_streams = num_streams
        self._num_requests = num_requests
        self.traced_ids: list[str] = []

    async def turn(self, watching: Watching) -> WatchedTurn:
        """Measure one turn."""
        self.traced_ids.clear()
        async with pages(self._url, watching.num_pages):
            before_s, began_at = await self._cpu_seconds(), now()
            await asyncio.gather(
                *(self._stream(number, watching.share) for number in range(self._num_streams))
            )
            seconds, cpu_s = now() - began_at, await self._cpu_seconds() - before_s
        num_tokens = self._num_streams * self._num_requests * NUM_TOKENS
        return WatchedTurn(num_tokens / seconds, 1e6 * cpu_s / num_tokens)

    async def _stream(self, number: int, share: float) -> None:
        params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, seed=number)
        for index in range(self._num_requests):
            place = number * self._num_requests + index
            is_traced = int(place * share) < int((place + 1) * share)
            traceparent = traceparent_of(started(sampled=True)) if is_traced else ""
            prompt = f"{number} {index}. {PROMPT}"
            async for chunk in self.client.stream(prompt, params, traceparent=traceparent):
                request_id = chunk.request_id
            if is_traced:
                self.traced_ids.append(request_id)

    async def largest_gap_ms(self) -> float:
        """Return by how much the spans of a request of the last turn differ from its time."""
        gaps_s = [0.0]
        for first in range(0, len(self.traced_ids), MAX_TRACE_IDS):
            ids = self.traced_ids[first : first + MAX_TRACE_IDS]
            for trace in await self.client.traces(ids):
                spans = [span for span in trace.spans if span.parent < 0]
                seconds = sum(span.ended_at - span.began_at for span in spans)
                gaps_s.append(abs(seconds - (trace.ended_at - trace.began_at)))
        return 1000 * max(gaps_s)

    async def _cpu_seconds(self) -> float:
        pids: dict[str, int] = (await self.client.info())["pids"]
        times = (psutil.Process(pid).cpu_times() for name, pid in pids.items()
                 if not name.startswith("worker_proc"))  # fmt: skip
        return float(sum(time.user + time.system for time in times))


@asynccontextmanager
async def servers(arguments: argparse.Namespace) -> AsyncIterator[dict[str, WatchedServer]]:
    """Yield the servers by name, each ready."""
    base = ServerConfig().replace(model=arguments.model, load_format=arguments.load_format)
    async with AsyncExitStack() as stack:
        collector = stack.enter_context(sink())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        configs = {
            PLAIN: base,
            TRACED: base.replace(otlp_endpoint=collector, trace_sampling_ratio=0.0),
            LOGGED: base.replace(log_format="json", log_requests=True),
        }
        found = {}
        for name, config in configs.items():
            port = free_port()
            server = stack.enter_context(OwnServer(config, folder / name, http_port=port))
            client = AsyncClient(server.endpoint, connect_timeout=600.0)
            await stack.enter_async_context(client)
            await server.wait_ready(lambda client=client: client.info(5.0))  # type: ignore[misc]
            url = f"http://127.0.0.1:{port}"
            found[name] = WatchedServer(client, url, arguments.streams, arguments.requests)
        yield found


async def measure(arguments: argparse.Namespace) -> None:
    """Measure turns of each kind, and print a table."""
    turns: dict[str, list[WatchedTurn]] = {watching.name: [] for watching in WATCHINGS}
    shares: dict[str, list[float]] = {watching.name: [] for watching in WATCHINGS}
    gap_ms, num_traced = 0.0, 0
    async with servers(arguments) as found:
        for server in found.values():
            await server.turn(OFF)  # the first ones warm up
        off = await found[PLAIN].turn(OFF)
        for _ in range(arguments.turns):
            for watching in WATCHINGS:
                server = found[watching.server]
                turns[watching.name].append(one := await server.turn(watching))
                gap_ms = max(gap_ms, await server.largest_gap_ms())
                num_traced += len(server.traced_ids)
                before, off = off, await found[PLAIN].turn(OFF)
                share = one.speed / ((before.speed + off.speed) / 2)
                shares[watching.name].append(share)
                print(f"{watching.name}: {one.speed:.0f} tokens/s, {share:.1%}", file=sys.stderr)
        info = await found[TRACED].client.info()
    _print_table(arguments, turns, shares)
    print(
        f"{num_traced} traced requests: their spans add up to their time within {gap_ms:.3f} ms;"
        f" {info.get('traces_dropped', 0)} traces dropped"
    )


def _print_table(
    arguments: argparse.Namespace,
    turns: dict[str, list[WatchedTurn]],
    shares: dict[str, list[float]],
) -> None:
    print(
        f"{arguments.streams} streams of {arguments.requests} requests of {NUM_TOKENS} tokens,"
        f" {arguments.turns} turns"
    )
    print("speed as a share of the turns without anything around; CPU without the worker")
    print(f"{'':>22}{'tokens/s':>10}{'share':>9}{'lowest':>9}{'highest':>9}{'CPU ms/1000':>13}")
    for name, values in shares.items():
        cells = (median(values), min(values), max(values))
        percents = "".join(f"{100 * value:8.1f}%" for value in cells)
        speed = median(turn.speed for turn in turns[name])
        cpu_ms = median(turn.cpu_ms for turn in turns[name])
        print(f"{name:>22}{speed:10.0f}{percents}{cpu_ms:13.1f}")


def main() -> None:
    """Measure servers of this machine."""
    parser = command_parser("bench.watch_cost", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=3, help="of each stream in a turn")
    parser.add_argument("--turns", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
