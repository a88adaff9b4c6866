"""The process around the gateway: uvloop, the ring's client, the web server, the orders."""

import asyncio
import gc
import logging
import time

import uvloop
from aiohttp import web

from http_proc.app import make_app
from http_proc.gateway import Gateway
from http_proc.listen import bind, tls_context
from quadriga.async_client import AsyncClient
from quadriga.errors import ServerFailed
from quadriga.process import DRAIN, FAIL, Child, run_child

LAST_WORDS = 1.0
"""Seconds that the last answers may take once the ring has nothing more to say."""


def main() -> None:
    """`python -m http_proc`. It yields the processor to the worker, on which all wait."""
    run_child("http_proc", lambda child: uvloop.run(serve(child)), niceness=10)


async def serve(child: Child) -> None:
    """Bind first: a port that is taken is known before anything is waited for."""
    args = child.config.http
    # What it logs as errors are bytes that are no HTTP; ours are logged where they are caught.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    listener = bind(args)
    began = time.monotonic()
    tls = tls_context(args)
    endpoint, patience = child.config.front_door.endpoint, child.config.launch.start_timeout
    async with AsyncClient(endpoint, connect_timeout=patience) as ring:
        gateway = Gateway(child.config, ring)
        runner = web.AppRunner(
            make_app(gateway), access_log=None, handler_cancellation=True, handle_signals=False
        )
        await runner.setup()
        site = web.SockSite(runner, listener, ssl_context=tls)
        await site.start()
        child.phase("connect", time.monotonic() - began)
        child.ready(url=args.url)
        gc.freeze()
        await _until_the_end(child, gateway, site)
        await runner.cleanup()


async def _until_the_end(child: Child, gateway: Gateway, site: web.SockSite) -> None:
    """Serve until the launcher says otherwise; then answer what is open.

    The ring ends every request that it has accepted. What then takes longer is a client that does
    not read.
    """
    loop = asyncio.get_running_loop()
    ordered = asyncio.Event()

    def take_orders() -> None:
        for order, why in child.lifeline.take_orders():
            if order == FAIL:
                gateway.fail_all(ServerFailed(why))
            if order in (DRAIN, FAIL):
                ordered.set()

    loop.add_reader(child.lifeline.fileno(), take_orders)
    await ordered.wait()
    await site.stop()
    await gateway.drain(LAST_WORDS)
