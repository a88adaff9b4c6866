"""The process around the front door: uvloop, sockets, the launcher's orders."""

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import NamedTuple

import uvloop

from quadriga.client.connection_watch import ConnectionWatch
from quadriga.errors import ServerFailed
from quadriga.model_files.resolve import ModelFiles, resolve_model
from quadriga.model_files.tokenizer import load_tokenizer
from quadriga.runtime.child import Child, Command, run_child
from quadriga.runtime.fault_injection import faulty_callback
from quadriga.runtime.malloc import map_large_blocks
from quadriga.runtime.open_files import FileWatch
from quadriga.wire.curve import Guard
from quadriga.wire.messages.public import InfoValues
from quadriga.wire.sockets import AsyncPort, Outbox, bind_frames, bind_public
from tokenizer_proc.frontend import Frontend
from tokenizer_proc.grammars.validator import GrammarValidator
from tokenizer_proc.overload import OverloadGuard
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.encode import Encoder
from tokenizer_proc.preparation.pool import PreparePool
from tokenizer_proc.preparation.pool_worker import ForkServer
from tokenizer_proc.preparation.prepare import Preparer
from tokenizer_proc.server_info import static_server_info

FLUSH_TIMEOUT_S = 1.0
"""Seconds that the last messages to clients may take when the server ends."""


class Loaded(NamedTuple):
    """What is there before the process has threads or sockets, so that it can fork."""

    model: ModelFiles
    preparer: Preparer
    fork_server: ForkServer
    facts: InfoValues


def main() -> None:
    run_child("tokenizer_proc", _run, low_priority=True)


def _run(child: Child) -> None:
    map_large_blocks()
    loaded = _load(child)
    uvloop.run(serve(child, loaded))


def _load(child: Child) -> Loaded:
    began = time.monotonic()
    config = child.config
    model = resolve_model(config.model)
    chat = ChatTemplate(model.tokenizer_dir)
    encoder = Encoder(load_tokenizer(model.tokenizer_dir), chat)
    preparer = Preparer(config.frontend, model, encoder)
    fork_server = ForkServer(preparer.prepare_frame)
    pids = {"launcher": os.getppid(), "tokenizer_proc": os.getpid()}
    child.phase("load tokenizer", time.monotonic() - began)
    return Loaded(model, preparer, fork_server, static_server_info(config, model, chat, pids))


async def serve(child: Child, loaded: Loaded) -> None:
    config = child.config
    endpoint, curve_dir = config.frontend.endpoint, config.frontend.curve_dir
    guard = Guard(Path(curve_dir)) if curve_dir else None
    public = bind_public(endpoint, guard.prepare) if guard else bind_public(endpoint)
    deliveries = bind_frames(child.endpoints.delivery)
    pool = PreparePool(loaded.fork_server, config.frontend.tokenize_workers)
    pool.open()
    grammars = GrammarValidator(loaded.model)
    scheduler = config.scheduler
    door = Frontend(
        config.frontend,
        OverloadGuard(scheduler.max_queued_requests, scheduler.max_requests_per_client),
        loaded.preparer,
        pool,
        grammars,
        Outbox(child.endpoints.scheduler),
        loaded.facts,
        replaces=child.is_restart,
    )
    port = (
        guard.port(public, door.on_public, door.clients.bar)
        if guard
        else AsyncPort(public, door.on_public)
    )
    door.open(port)
    on_delivery = faulty_callback(door.on_delivery, "tokenizer", config.launch.fault)
    delivery_port = AsyncPort(deliveries, on_delivery)
    watch = ConnectionWatch(public, door.clients.on_disconnect, on_accept=FileWatch().on_accept)
    child.ready()
    gc.freeze()
    child.control.answer_in_loop()
    asyncio.get_running_loop().add_reader(child.control.fileno(), lambda: _take_orders(child, door))
    await door.ended.wait()
    pool.close()
    grammars.close()
    watch.close()
    delivery_port.close()
    port.close(FLUSH_TIMEOUT_S)
    if guard:
        guard.close()


def _take_orders(child: Child, door: Frontend) -> None:
    for order, argument in child.control.read_commands():
        if order is Command.DRAIN:
            door.intake.drain()
        elif order is Command.ABORT:
            door.intake.abort_incoming(argument)
        elif order is Command.RESTARTED and argument == "scheduler_proc":
            door.intake.scheduler_was_replaced()
        elif order is Command.FAIL:
            door.clients.tell_all(ServerFailed(argument))
            door.ended.set()
