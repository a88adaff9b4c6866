"""A proxy that closes a connection on which nothing is sent for some time, as load balancers do.

A request that waits in the queue passes through it, thanks to the comments of the gateway:

python -m tests.faults.idle_proxy --idle 20 --wait 60
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from bench.client.server import free_port
from quadriga.client import AsyncClient, SamplingParams
from tests.server import Server, running_server
from tests.tiny_models import tiny_llama

FLAGS = ["--max-total-tokens", "4096", "--worker-threads", "1", "--max-running-requests", "1"]


class IdleProxy:
    """Forward connections to a port, and close those on which nothing was sent for `idle_s`.

    Attributes:
        port: where it listens.
        num_closed: connections that were idle for too long.
    """

    def __init__(self, target_port: int, idle_s: float) -> None:
        self._target_port = target_port
        self._idle_s = idle_s
        self.port = 0
        self.num_closed = 0

    async def forward(
        self, client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        last = [time.monotonic()]

        async def pipe(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                last[0] = time.monotonic()
                target.write(data)
                await target.drain()

        pipes = [
            asyncio.create_task(pipe(client_reader, writer)),
            asyncio.create_task(pipe(reader, client_writer)),
        ]
        while not any(task.done() for task in pipes):
            idle_s = time.monotonic() - last[0]
            if idle_s > self._idle_s:
                self.num_closed += 1
                break
            await asyncio.wait(
                pipes, timeout=self._idle_s - idle_s, return_when=asyncio.FIRST_COMPLETED
            )
        for task in pipes:
            task.cancel()
        for end in (writer, client_writer):
            end.close()


@asynccontextmanager
async def idle_proxy(target_port: int, idle_s: float) -> AsyncIterator[IdleProxy]:
    """Run a proxy until the block ends."""
    proxy = IdleProxy(target_port, idle_s)
    server = await asyncio.start_server(proxy.forward, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


async def answer_through(
    proxy: IdleProxy, server: Server, wait_s: float, max_tokens: int = 4
) -> list[str]:
    """Return the lines of a stream that waits for `wait_s` behind another request.

    The worker stands still meanwhile, so that the request before it holds the only slot.
    """
    params = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
    worker = server.pid_of("worker_proc")
    os.kill(worker, signal.SIGSTOP)
    continues = asyncio.get_running_loop().call_later(wait_s, os.kill, worker, signal.SIGCONT)
    body = {"prompt": "The quick", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    try:
        async with AsyncClient(server.endpoint) as client, aiohttp.ClientSession() as session:
            before = asyncio.create_task(client.generate([3] * 8, params))
            while (await client.info())["open_requests"] == 0:
                await asyncio.sleep(0.01)
            url = f"http://127.0.0.1:{proxy.port}/v1/completions"
            try:
                async with session.post(url, json=body) as response:
                    lines = (await response.text()).split("\n")
            finally:
                os.kill(worker, signal.SIGCONT)
                await before
            return [line for line in lines if line]
    finally:
        continues.cancel()
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


async def run(idle_s: float, wait_s: float, flags: list[str]) -> None:
    """Send a request through a proxy, and print what arrives."""
    with tempfile.TemporaryDirectory() as directory:
        model, port = tiny_llama(Path(directory)), free_port()
        flags = ["--model", str(model), *FLAGS, "--port", str(port), *flags]
        with running_server(Path(directory) / "log", *flags) as server:
            async with idle_proxy(port, idle_s) as proxy:
                began_at = time.monotonic()
                try:
                    lines = await answer_through(proxy, server, wait_s)
                except aiohttp.ClientError as error:
                    lines = [f"failed: {error!r}"]
                print(f"idle limit {idle_s:g} s, waited {time.monotonic() - began_at:.1f} s")
                print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=float, default=20.0, help="idle limit of the proxy")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds until the admission")
    arguments, flags = parser.parse_known_args()
    asyncio.run(run(arguments.idle, arguments.wait, flags))


if __name__ == "__main__":
    main()
