"""The detokenizer process: blocks for a step's ids, sends each client its text."""

import logging
import os
import time

from detok_proc.detokenizer import Detokenizer
from quadriga.model_files.resolve import resolve_model
from quadriga.model_files.tokenizer import load_tokenizer
from quadriga.runtime.child import Child, ControlChannel, run_child
from quadriga.runtime.fault_injection import FaultyInbox, faulty_inbox
from quadriga.wire.messages.public import Info, SentChunks, SentReplay
from quadriga.wire.messages.to_detok import (
    Delivered,
    DetokMessage,
    Drained,
    InfoReply,
    NewScheduler,
    StepOutput,
    StopDetok,
)
from quadriga.wire.messages.to_scheduler import DetokReady, StopFound
from quadriga.wire.sockets import Inbox, Outbox, Poller, encode


def main() -> None:
    """`python -m detok_proc`. It yields the processor to the worker, on which all wait."""
    run_child("detok_proc", body, low_priority=True)


def body(child: Child) -> None:
    """Bind first, so that nothing which is sent during the start is lost."""
    inbox = faulty_inbox(
        Inbox[DetokMessage](child.endpoints.detok, DetokMessage),
        "detok",
        child.config.launch.fault,
    )
    began = time.perf_counter()
    tokenizer = load_tokenizer(resolve_model(child.config.model).tokenizer_dir)
    detokenizer = Detokenizer(tokenizer, child.config.detok.stream_interval)
    child.phase("load tokenizer", time.perf_counter() - began)
    delivery = Outbox(child.endpoints.delivery)
    scheduler = Outbox(child.endpoints.scheduler)
    child.ready()
    serve(child.control, inbox, detokenizer, delivery, scheduler)


def serve(
    control: ControlChannel,
    inbox: "Inbox[DetokMessage] | FaultyInbox[DetokMessage]",
    detokenizer: Detokenizer,
    delivery: Outbox,
    scheduler: Outbox,
) -> None:
    """Until StopDetok. Drained is passed on to the tokenizer as three empty frames."""
    control.answer_in_loop()
    poller = Poller(inbox, control)
    session = _begin(detokenizer, scheduler)
    while True:
        poller.wait()
        control.read_commands()
        for message in inbox.drain():
            if isinstance(message, StopDetok):
                logging.debug("leaving with %d open requests", detokenizer.open_requests)
                return
            if isinstance(message, Drained):
                delivery.send_frames(b"", b"", b"")
            elif isinstance(message, NewScheduler):
                session = _begin(detokenizer, scheduler)
            elif isinstance(message, InfoReply):
                info = encode(_with_own_pid(message.info))
                delivery.send_frames(message.client, info, encode(Delivered(inspected=True)))
            elif message.session == session:
                deliver(message, detokenizer, delivery, scheduler)


def _begin(detokenizer: Detokenizer, scheduler: Outbox) -> int:
    """Know nothing, and let the scheduler tell all that runs. The session from then on."""
    detokenizer.forget_all()
    session = time.monotonic_ns()
    scheduler.send(DetokReady(session))
    return session


def _with_own_pid(info: Info) -> Info:
    pids = info.values.get("pids")
    if isinstance(pids, dict):
        info.values["pids"] = pids | {"detok_proc": os.getpid()}
    return info


def deliver(
    output: StepOutput, detokenizer: Detokenizer, delivery: Outbox, scheduler: Outbox
) -> None:
    """One message to each client that this step gave something, the last of them with word of
    all ends for the scheduler; and what it is to end."""
    deliveries = detokenizer.process(output)
    messages: list[tuple[bytes, SentReplay | SentChunks]] = [
        *((client, SentReplay(chunks)) for client, chunks in deliveries.again.items()),
        *((client, SentChunks(chunks)) for client, chunks in deliveries.by_client.items()),
    ]
    for number, (client, message) in enumerate(messages, start=1):
        ended = [chunk.request_id for chunk in message.chunks if chunk.end is not None]
        settled = deliveries.ended if number == len(messages) else []
        told = Delivered(ended, output.waiting, settled)
        delivery.send_frames(client, encode(message), encode(told))
    if deliveries.stop_found:
        scheduler.send(StopFound(deliveries.stop_found))
