"""The process around the front door: uvloop, sockets, the launcher's orders."""

import asyncio
import gc
import os
import time
from pathlib import Path

import uvloop

from quadriga.curve import Guard
from quadriga.errors import ServerFailed
from quadriga.faults import faulty_callback
from quadriga.model_source import resolve_model
from quadriga.open_files import FileWatch
from quadriga.process import DRAIN, FAIL, REPLACED, Child, run_child
from quadriga.sockets import AsyncPort, ConnectionWatch, Outbox, bind_frames, bind_front_door
from quadriga.text import load_tokenizer
from tokenizer_proc.chat import ChatTemplate
from tokenizer_proc.encode import Encoder
from tokenizer_proc.facts import facts_of
from tokenizer_proc.front_door import FrontDoor

LAST_WORDS = 1.0
"""Seconds that the last messages to clients may take when the server ends."""


def main() -> None:
    run_child("tokenizer_proc", lambda child: uvloop.run(serve(child)), gives_way=True)


async def serve(child: Child) -> None:
    config = child.config
    endpoint, curve_dir = config.front_door.endpoint, config.front_door.curve_dir
    guard = Guard(Path(curve_dir)) if curve_dir else None
    public = bind_front_door(endpoint, guard.prepare) if guard else bind_front_door(endpoint)
    deliveries = bind_frames(child.endpoints.delivery)
    door = _make_door(child)
    port = (
        guard.port(public, door.on_public, door.clients.bar)
        if guard
        else AsyncPort(public, door.on_public)
    )
    door.open(port)
    on_delivery = faulty_callback(door.on_delivery, "tokenizer", config.launch.fault)
    delivery_port = AsyncPort(deliveries, on_delivery)
    watch = ConnectionWatch(public, door.clients.on_disconnect, on_accept=FileWatch().accepted)
    child.ready()
    gc.freeze()
    child.lifeline.attend()
    asyncio.get_running_loop().add_reader(
        child.lifeline.fileno(), lambda: _take_orders(child, door)
    )
    await door.ended.wait()
    watch.close()
    delivery_port.close()
    port.close(LAST_WORDS)
    if guard:
        guard.close()


def _make_door(child: Child) -> FrontDoor:
    began = time.monotonic()
    config = child.config
    model = resolve_model(config.model)
    chat = ChatTemplate(model.tokenizer_dir)
    tokenizer = load_tokenizer(model.tokenizer_dir)
    encoder = Encoder(tokenizer, chat, config.front_door.tokenize_workers)
    child.phase("load tokenizer", time.monotonic() - began)
    pids = {"launcher": os.getppid(), "tokenizer_proc": os.getpid()}
    return FrontDoor(
        config.front_door,
        config.scheduler.max_queued_requests,
        model,
        encoder,
        Outbox(child.endpoints.scheduler),
        facts_of(config, model, chat, pids),
        again=child.again,
    )


def _take_orders(child: Child, door: FrontDoor) -> None:
    for order, argument in child.lifeline.take_orders():
        if order == DRAIN:
            door.drain()
        elif order == REPLACED and argument == "scheduler_proc":
            door.scheduler_was_replaced()
        elif order == FAIL:
            door.clients.tell_all(ServerFailed(argument))
            door.ended.set()
