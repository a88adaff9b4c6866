"""Measure what the live feed costs: `python -m bench.live_cost`.

A server generates for 64 streams, in turns without a view, with one view of GET /v1/live, and with
many. The tokens per second of each turn are compared with those of the turns without a view around
it, so that a machine that becomes slower meanwhile changes little.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import aiohttp
import psutil

from bench.client.server import OwnServer, free_port
from quadriga.client.async_client import AsyncClient
from quadriga.clock import now
from quadriga.config.server_config import ServerConfig
from quadriga.sampling.params import SamplingParams

PROMPT = "Write down everything that you know about the sea and the ships on it."


async def tokens_per_second(client: AsyncClient, num_streams: int, num_tokens: int) -> float:
    """Return the speed of so many streams together."""
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, seed=1)

    async def read(number: int) -> None:
        async for _ in client.stream(f"{number}. {PROMPT}", params):
            pass

    began_at = now()
    await asyncio.gather(*(read(number) for number in range(num_streams)))
    return num_streams * num_tokens / (now() - began_at)


@asynccontextmanager
async def views(url: str, num_views: int) -> AsyncIterator[None]:
    """Keep so many views open in a `with` block, and read all that they are sent."""

    async def read(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/v1/live") as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        readers = [asyncio.create_task(read(session)) for _ in range(num_views)]
        try:
            yield
        finally:
            for reader in readers:
                reader.cancel()
            if readers:
                await asyncio.wait(readers)


class Turn(NamedTuple):
    """What one turn has measured: tokens per second, and CPU ms for 1,000 tokens.

    The CPU time is that of all processes but the worker; it says more than the speed on a machine
    that has other work.
    """

    speed: float
    cpu_ms: float


class LiveCost:
    """Turns with and without views.

    Args:
        client: sends the load.
        url: of the gateway.
    """

    def __init__(self, client: AsyncClient, url: str, num_streams: int, num_tokens: int) -> None:
        self._client = client
        self._url = url
        self._num_streams = num_streams
        self._num_tokens = num_tokens

    async def turn(self, num_views: int) -> Turn:
        """Measure one turn."""
        async with views(self._url, num_views):
            before = await self._cpu_seconds()
            speed = await tokens_per_second(self._client, self._num_streams, self._num_tokens)
            cpu_s = await self._cpu_seconds() - before
        return Turn(speed, 1e6 * cpu_s / (self._num_streams * self._num_tokens))

    async def _cpu_seconds(self) -> float:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._url}/server_info") as response,
        ):
            pids: dict[str, int] = (await response.json())["pids"]
        times = (psutil.Process(pid).cpu_times() for name, pid in pids.items()
                 if name != "worker_proc")  # fmt: skip
        return sum(time.user + time.system for time in times)


async def measure(arguments: argparse.Namespace) -> None:
    """Measure turns of each kind, and print a table."""
    port = free_port()
    config = ServerConfig().replace(model=arguments.model, load_format=arguments.load_format)
    log = Path(arguments.log) if arguments.log else None
    with OwnServer(config, log, http_port=port) as server:
        async with AsyncClient(server.endpoint, connect_timeout=600.0) as client:
            await server.wait_ready(lambda: client.info(5.0))
            url = f"http://127.0.0.1:{port}"
            cost = LiveCost(client, url, arguments.streams, arguments.tokens)
            await cost.turn(0)  # the first one warms up
            off = await cost.turn(0)
            turns: dict[int, list[Turn]] = {count: [] for count in arguments.views}
            shares: dict[int, list[float]] = {count: [] for count in arguments.views}
            for _ in range(arguments.turns):
                for count in arguments.views:
                    turns[count].append(turn := await cost.turn(count))
                    before, off = off, await cost.turn(0)
                    shares[count].append(turn.speed / ((before.speed + off.speed) / 2))
    _print_table(arguments, turns, shares)


def _print_table(
    arguments: argparse.Namespace, turns: dict[int, list[Turn]], shares: dict[int, list[float]]
) -> None:
    print(f"{arguments.streams} streams of {arguments.tokens} tokens, {arguments.turns} turns")
    print("speed as a share of the turns without a view before and after; CPU without the worker")
    print(f"{'views':>6}{'tokens/s':>10}{'share':>9}{'lowest':>9}{'highest':>9}{'CPU ms/1000':>13}")
    for count, values in shares.items():
        cells = (median(values), min(values), max(values))
        percents = "".join(f"{100 * value:8.1f}%" for value in cells)
        speed = median(turn.speed for turn in turns[count])
        cpu_ms = median(turn.cpu_ms for turn in turns[count])
        print(f"{count:6}{speed:10.0f}{percents}{cpu_ms:13.1f}")


def main() -> None:
    """Measure views of this machine's server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--views", type=int, nargs="*", default=[0, 1, 100])
    parser.add_argument("--log", help="file for the server's log (default: standard error)")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
