"""The process around the gateway: uvloop, the ring's client, the web server, the orders."""

import asyncio
import gc
import logging
import time

import uvloop

from http_proc.gateway import Gateway
from http_proc.listener import FLUSH_TIMEOUT_S, bind, listen, make_runner, tls_context
from quadriga.client.async_client import AsyncClient
from quadriga.errors import ServerFailed
from quadriga.runtime.child import Child, Command, run_child


def main() -> None:
    """`python -m http_proc`. It yields the processor to the worker, on which all wait."""
    run_child("http_proc", lambda child: uvloop.run(serve(child)), low_priority=True)


async def serve(child: Child) -> None:
    """Bind first: a port that is taken is known before anything is waited for."""
    args = child.config.http
    # What it logs as errors are bytes that are no HTTP; ours are logged where they are caught.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    listener, tls = bind(args), tls_context(args)
    began = time.monotonic()
    endpoint, patience = child.config.frontend.endpoint, child.config.launch.start_timeout
    keys = child.config.frontend.curve_dir
    async with AsyncClient(endpoint, connect_timeout=patience, curve_dir=keys) as ring:
        gateway = Gateway(child.config, ring)
        runner = await make_runner(gateway)
        server = await listen(runner, listener, tls, gateway)
        child.phase("connect", time.monotonic() - began)
        if not child.is_restart:
            await gateway.until_ready()  # so that the start is over when /readyz says so
        child.ready(url=args.url)
        gc.freeze()
        await _until_the_end(child, gateway, server)
        await runner.cleanup()


async def _until_the_end(child: Child, gateway: Gateway, server: asyncio.Server) -> None:
    """Serve until the launcher says otherwise; then answer what is open.

    The ring ends every request that it has accepted. What then takes longer is a client that does
    not read.
    """
    loop = asyncio.get_running_loop()
    ordered = asyncio.Event()

    def read_commands() -> None:
        for order, why in child.control.read_commands():
            if order is Command.FAIL:
                gateway.fail_all(ServerFailed(why))
            if order in (Command.DRAIN, Command.FAIL):
                ordered.set()

    loop.add_reader(child.control.fileno(), read_commands)
    child.control.answer_in_loop()
    await ordered.wait()
    server.close()
    await gateway.drain(FLUSH_TIMEOUT_S)
