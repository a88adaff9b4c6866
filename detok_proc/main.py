"""The detokenizer process: blocks for a step's ids, sends each client its text."""

import logging
import os
import time
from itertools import chain

from detok_proc.detokenizer import Detokenizer
from quadriga.messages.public import Info, SentChunks
from quadriga.messages.to_detok import DetokMessage, InfoReply, StepOutput, StopDetok
from quadriga.messages.to_scheduler import StopFound
from quadriga.model_source import resolve_model
from quadriga.process import Child, run_child
from quadriga.sockets import Inbox, Outbox, encode
from quadriga.text import load_tokenizer


def main() -> None:
    """`python -m detok_proc`. It yields the processor to the worker, on which all wait."""
    run_child("detok_proc", body, niceness=10)


def body(child: Child) -> None:
    """Bind first, so that nothing which is sent during the start is lost."""
    inbox: Inbox[DetokMessage] = Inbox(child.endpoints.detok, DetokMessage)
    began = time.perf_counter()
    tokenizer = load_tokenizer(resolve_model(child.config.model).tokenizer_dir)
    detokenizer = Detokenizer(tokenizer, child.config.detok.stream_interval)
    child.phase("load tokenizer", time.perf_counter() - began)
    delivery = Outbox(child.endpoints.delivery)
    scheduler = Outbox(child.endpoints.scheduler)
    child.ready()
    serve(inbox, detokenizer, delivery, scheduler)


def serve(
    inbox: "Inbox[DetokMessage]", detokenizer: Detokenizer, delivery: Outbox, scheduler: Outbox
) -> None:
    """Until StopDetok, which is passed on to the tokenizer as two empty frames."""
    while True:
        for message in chain([inbox.receive()], inbox.drain()):
            if isinstance(message, StopDetok):
                delivery.send_frames(b"", b"")
                logging.debug("leaving with %d open requests", detokenizer.open_requests)
                return
            if isinstance(message, InfoReply):
                delivery.send_frames(message.client, encode(_with_own_pid(message.info)))
            else:
                deliver(message, detokenizer, delivery, scheduler)


def _with_own_pid(info: Info) -> Info:
    pids = info.values.get("pids")
    if isinstance(pids, dict):
        info.values["pids"] = pids | {"detok_proc": os.getpid()}
    return info


def deliver(
    output: StepOutput, detokenizer: Detokenizer, delivery: Outbox, scheduler: Outbox
) -> None:
    """One message to each client that this step gave something, and one to the scheduler."""
    by_client, stop_found = detokenizer.process(output)
    for client, chunks in by_client.items():
        delivery.send_frames(client, encode(SentChunks(chunks)))
    if stop_found:
        scheduler.send(StopFound(stop_found))
