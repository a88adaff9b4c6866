"""The process around the front door: uvloop, sockets, the launcher's orders."""

import asyncio
import gc
import os
import time

import uvloop

from quadriga.errors import ServerFailed
from quadriga.model_source import resolve_model
from quadriga.process import DRAIN, FAIL, Child, run_child
from quadriga.sockets import AsyncPort, ConnectionWatch, Outbox, bind_frames, bind_front_door
from quadriga.text import load_tokenizer
from tokenizer_proc.chat import ChatTemplate
from tokenizer_proc.encode import Encoder
from tokenizer_proc.front_door import FrontDoor, facts_of

LAST_WORDS = 1.0
"""Seconds that the last messages to clients may take when the server ends."""


def main() -> None:
    run_child("tokenizer_proc", lambda child: uvloop.run(serve(child)), niceness=10)


async def serve(child: Child) -> None:
    config = child.config
    public = bind_front_door(config.front_door.endpoint)
    deliveries = bind_frames(child.endpoints.delivery)
    door = _make_door(child)
    port = AsyncPort(public, door.on_public)
    door.open(port)
    delivery_port = AsyncPort(deliveries, door.on_delivery)
    watch = ConnectionWatch(public, door.on_disconnect)
    child.ready()
    gc.freeze()
    asyncio.get_running_loop().add_reader(
        child.lifeline.fileno(), lambda: _take_orders(child, door)
    )
    await door.ended.wait()
    watch.close()
    delivery_port.close()
    port.close(LAST_WORDS)


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
        model,
        encoder,
        Outbox(child.endpoints.scheduler),
        facts_of(config, model, chat, pids),
    )


def _take_orders(child: Child, door: FrontDoor) -> None:
    for order, argument in child.lifeline.take_orders():
        if order == DRAIN:
            door.drain()
        elif order == FAIL:
            door.tell_all(ServerFailed(argument))
            door.ended.set()
