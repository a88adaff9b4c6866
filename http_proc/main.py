"""Entry point of the gateway process: event loop, clients of the server, web server, commands."""

import asyncio
import gc
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import uvloop

from http_proc.apis.model_states import MODEL_STATES, ModelStates, set_states
from http_proc.apis.responses.background import BACKGROUND
from http_proc.core.gateway import Gateway
from http_proc.core.recorder import open_recorder
from http_proc.core.served_model import LOST, ServedModel, ServedModels
from http_proc.jobs.batches import BATCHES
from http_proc.server import FLUSH_TIMEOUT_S, bind, listen, make_runner, tls_context
from http_proc.web.resumable import STREAM_ROWS, STREAMS
from http_proc.web.stream_rows import StreamRows
from quadriga.client.async_client import AsyncClient
from quadriga.errors import ServerFailed, ServerUnreachable
from quadriga.server.config.server_config import ServerConfig, from_argv
from quadriga.server.model_list import read_models
from quadriga.server.models.adapters.store import AdapterStore
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import Command
from quadriga.wire.client import gateway_address


def main() -> None:
    """Run the gateway with a lower CPU priority than the worker's."""
    run_child("http_proc", lambda child: uvloop.run(serve(child)), low_priority=True)


async def serve(child: Child) -> None:
    """Serve until the launcher stops this process.

    The port is bound first, so that a taken port is reported before the model is loaded.
    """
    args = child.config.http
    # It logs bytes that are not HTTP as errors. Exceptions of handlers are logged by middleware.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    listener, tls = bind(args), tls_context(args)
    began_at = time.monotonic()
    rows = _stream_rows(child)
    models = await _models(child, rows)
    async with _connected(models, child.is_restart):
        gateway = Gateway(child.config, models, child.endpoints.run_dir)
        gateway[STREAM_ROWS] = rows
        recorder = open_recorder(gateway, child.is_restart)
        gateway[MODEL_STATES] = ModelStates(partial(child.control.report, "model"))
        runner = await make_runner(gateway)
        server = await listen(runner, listener, tls, gateway)
        child.phase("connect", time.monotonic() - began_at)
        if not child.is_restart:
            await gateway.until_ready()  # the launcher reports "ready" when /readyz does
        child.ready(url=args.url)
        gc.freeze()
        await _serve_until_stopped(child, gateway, server)
        await runner.cleanup()
        await asyncio.to_thread(recorder.close)
        await asyncio.to_thread(gateway.traces.close)
        for model in models:
            await model.lasting_client.close()
        rows.close()


async def _models(child: Child, rows: StreamRows) -> ServedModels:
    """Return the models of --models-file; without the flag the only one, that of the config."""
    timeout_s, keys = child.config.launch.start_timeout, child.config.frontend.curve_dir
    interval_s = child.config.http.sse_ping_interval

    def clients(endpoint: str) -> list[AsyncClient]:
        return [
            AsyncClient(endpoint, connect_timeout=timeout_s, curve_dir=keys, identity=identity)
            for identity in (gateway_address(), rows.address)
        ]

    def adapters(config: ServerConfig, name: str) -> AdapterStore | None:
        if not config.model.serves_adapters:
            return None
        return AdapterStore.of_model(child.server_dir, name, config)

    if not child.models_file:
        only = ServedModel(
            child.config,
            *clients(child.public_endpoint),
            ping_interval_s=interval_s,
            adapters=adapters(child.config, ""),
        )
        return ServedModels([only])
    models = []
    for each in read_models(Path(child.models_file)):
        config = from_argv(each.flags)
        model = ServedModel(
            config,
            *clients(each.endpoint),
            ping_interval_s=interval_s,
            name=each.name,
            aliases=each.aliases,
            preload=each.preload,
            adapters=adapters(config, each.name),
        )
        if each.lost:
            await model.lose(ServerFailed(each.lost))
        models.append(model)
    return ServedModels(models)


# A gateway that takes the place of another one waits so long for models that do not answer; then it
# serves the others.
CONNECT_S = 5.0
CONNECT_RETRY_S = 1.0


@asynccontextmanager
async def _connected(models: ServedModels, is_restart: bool) -> AsyncIterator[None]:
    """Keep the clients of all models connected in a `with` block. Raise QuadrigaError."""
    may_miss_some = is_restart and len(models) > 1
    connect = _connect_sometime if may_miss_some else AsyncClient.connect
    connecting = [
        asyncio.create_task(connect(model.client)) for model in models if model.state != LOST
    ]
    try:
        if may_miss_some:
            await asyncio.wait(connecting, timeout=CONNECT_S)
        else:
            await asyncio.gather(*connecting)
        yield
    finally:
        for task in connecting:
            task.cancel()
        for model in models:
            await model.client.close()


async def _connect_sometime(client: AsyncClient) -> None:
    """Connect, however long it takes."""
    while True:
        try:
            await client.connect()
        except ServerUnreachable:
            await asyncio.sleep(CONNECT_RETRY_S)
        else:
            return


def _stream_rows(child: Child) -> StreamRows:
    """Return what earlier gateways have left: those of this server, or of the data directory."""
    data_dir = child.config.data_dir
    return StreamRows(data_dir or child.endpoints.run_dir, outlives_server=data_dir is not None)


def _report_what_ends(gateway: Gateway) -> None:
    """Log the batches and responses in the background that are lost with the server."""
    num_batches, background = gateway[BATCHES].num_open, gateway.get(BACKGROUND)
    num_responses = 0 if background is None else background.num_open
    if num_batches or num_responses:
        logging.warning(
            "%d open batches and %d responses in the background end with this server; a server with"
            " --data-dir goes on with them at its next start",
            num_batches,
            num_responses,
        )


# Before the end of --shutdown-timeout, when the scheduler aborts what is left.
LEAVE_BEFORE_S = 1.0


def _leave_streams(gateway: Gateway) -> None:
    """Leave the resumable streams to the next server, where their rows outlive this one."""
    if gateway[STREAM_ROWS].outlives_server:
        gateway[STREAMS].interrupt()
        for model in gateway.models:
            model.lasting_client.leave_requests()


async def _leave_later(gateway: Gateway, timeout_s: float) -> None:
    """Leave what is open of the resumable streams shortly before a stop is over.

    timeout_s: seconds that the stop may take.
    """
    await asyncio.sleep(max(0.0, timeout_s - LEAVE_BEFORE_S))
    if gateway[STREAM_ROWS].outlives_server:
        _leave_streams(gateway)
        await gateway[STREAMS].stop()


async def _lose_model(gateway: Gateway, name: str, reason: str) -> None:
    """End the open requests of a model whose processes have ended, and refuse further ones."""
    for model in gateway.models:
        if model.name == name:
            await model.lose(ServerFailed(reason))
            gateway[MODEL_STATES].note_change()


async def _serve_until_stopped(child: Child, gateway: Gateway, server: asyncio.Server) -> None:
    """Wait for a command to stop, then interrupt what goes on later, and answer the open requests.

    The server finishes every accepted request or aborts it, so that only slow clients need a time
    limit. A resumable stream that takes longer than a stop goes on at the next server.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    losing: set[asyncio.Task[None]] = set()

    def read_commands() -> None:
        for command, reason in child.control.read_commands():
            if command is Command.FAIL:
                _leave_streams(gateway)
                gateway.fail_all(ServerFailed(reason))
            elif command is Command.MODELS:
                set_states(gateway, reason)
            elif command is Command.LOST:
                losing.add(loop.create_task(_lose_model(gateway, *reason.split(" ", 1))))
            if command in (Command.DRAIN, Command.FAIL):
                stopping.set()

    loop.add_reader(child.control.fileno(), read_commands)
    child.control.answer_in_loop()
    child.control.fail_clients_at_launcher_death()
    await stopping.wait()
    leaving = asyncio.create_task(_leave_later(gateway, child.config.launch.shutdown_timeout))
    server.close()
    if not gateway.outlives_server:
        _report_what_ends(gateway)
    await gateway[BATCHES].stop()
    if (background := gateway.get(BACKGROUND)) is not None:
        await background.stop()
    await gateway.drain(FLUSH_TIMEOUT_S)
    leaving.cancel()
