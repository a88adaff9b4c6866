"""The detokenizer process: blocks until a step's token ids arrive, and sends each client its text.

Its messages go to the tokenizer process as three frames: the client's address, the encoded public
message, and a Delivered. A message of the live feed has no address, and three empty frames stand
for Drained.
"""

import logging
import os
import time

import msgspec

from detok_proc.detokenizer import Detokenizer
from detok_proc.step_news import step_news
from detok_proc.traces import close_traces, open_traces
from quadriga.model_files.resolve import resolve_model
from quadriga.model_files.tokenizer import load_tokenizer
from quadriga.runtime.child import Child, run_child
from quadriga.runtime.control_channel import ControlChannel
from quadriga.wire.messages.to_client import Info, PlainChunk, SentChunks, SentReplay
from quadriga.wire.messages.to_detok import (
    READ_DETOK_MESSAGE,
    Delivered,
    DetokMessage,
    Drained,
    ForecastStepOutput,
    HandedBack,
    InfoReply,
    LiveFrame,
    ProgressReply,
    ReplicaDelivered,
    ReplicaOutput,
    SchedulerRestarted,
    StopDetok,
)
from quadriga.wire.messages.to_scheduler import DetokReady, StopFound
from quadriga.wire.sockets import Inbox, Outbox, Poller, encode


def main() -> None:
    """Run `python -m detok_proc`, at a lower priority than the worker."""
    run_child("detok_proc", body, low_priority=True)


def body(child: Child) -> None:
    """Load the tokenizer and serve. Bind first, so that no message of the start is lost."""
    inbox = Inbox[DetokMessage](child.endpoints.detok, READ_DETOK_MESSAGE)
    began_at = time.perf_counter()
    tokenizer = load_tokenizer(resolve_model(child.config.model).tokenizer_dir)
    detokenizer = Detokenizer(tokenizer, child.config.detok.stream_interval)
    child.phase("load tokenizer", time.perf_counter() - began_at)
    prepare = child.endpoints.links.prepare_connect
    delivery = Outbox(child.endpoints.delivery, prepare)
    scheduler = Outbox(child.endpoints.scheduler, prepare)
    child.ready()
    serve(child.control, inbox, detokenizer, delivery, scheduler)


def serve(
    control: ControlChannel,
    inbox: Inbox[DetokMessage],
    detokenizer: Detokenizer,
    delivery: Outbox,
    scheduler: Outbox,
) -> None:
    """Serve until StopDetok."""
    control.answer_in_loop()
    poller = Poller(inbox, control)
    session = _begin_session(detokenizer, scheduler)
    while True:
        poller.wait()
        control.read_commands()
        for message in inbox.drain():
            if isinstance(message, StopDetok):
                severity = logging.WARNING if detokenizer.num_open else logging.DEBUG
                logging.log(severity, "stopping with %d open requests", detokenizer.num_open)
                return
            if isinstance(message, SchedulerRestarted):
                session = _begin_session(detokenizer, scheduler)
            elif isinstance(message, ForecastStepOutput):
                if message.session == session:
                    deliver(message, detokenizer, delivery, scheduler)
            else:
                if isinstance(message, HandedBack):
                    detokenizer.forget(message.seqs)
                delivery.send_frames(*_passed_on(message))


def _passed_on(
    message: InfoReply | ProgressReply | LiveFrame | Drained | HandedBack,
) -> tuple[bytes, bytes, bytes]:
    """Return the frames of a message of the scheduler that has no text."""
    match message:
        case InfoReply():
            info = encode(_with_own_pid(message.info))
            return message.client, info, encode(Delivered(inspected=True))
        case ProgressReply():
            return message.client, encode(message.progress), encode(Delivered(inspected=True))
        case LiveFrame():
            return b"", message.frame, b""
        case HandedBack():
            return b"", encode(HandedBack(message.number)), b""
        case Drained():
            return b"", b"", b""


def _begin_session(detokenizer: Detokenizer, scheduler: Outbox) -> int:
    """Forget every text and ask the scheduler to replay what runs. Return the new session."""
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
    output: ForecastStepOutput, detokenizer: Detokenizer, delivery: Outbox, scheduler: Outbox
) -> None:
    """Send the results of one step: one message per client, and the stops for the scheduler.

    The last message lists all ends of the step, because only then all of them are on their way. Of
    the ends of lost clients the frontend gets the Delivered alone.
    """
    deliveries = detokenizer.process(output)
    news = output.news if isinstance(output, ReplicaOutput) else None
    if news is not None:
        delivery.send_frames(b"", b"", encode(step_news(output, news)))
    traces = open_traces(output) if deliveries.ended else {}
    messages: list[tuple[bytes, SentReplay | SentChunks | None, list[PlainChunk]]] = [
        *((client, SentReplay(chunks), chunks) for client, chunks in deliveries.replays.items()),
        *((client, SentChunks(chunks), chunks) for client, chunks in deliveries.by_client.items()),
        *((client, None, chunks) for client, chunks in deliveries.lost.items()),
    ]
    for number, (client, message, chunks) in enumerate(messages, start=1):
        ended = [chunk for chunk in chunks if chunk.end is not None]
        ended_seqs = deliveries.ended if number == len(messages) else []
        delivered = Delivered(
            ended=[chunk.request_id for chunk in ended],
            waiting=output.waiting,
            settled=ended_seqs,
            generated=[chunk.end.usage.completion_tokens for chunk in ended if chunk.end],
            wait_s=output.wait_s,
            traces=close_traces(traces, client, chunks) if traces else [],
            lost=message is None,
        )
        if news is not None:
            indexes = [chunk.choice for chunk in ended]
            delivered = ReplicaDelivered(**msgspec.structs.asdict(delivered), indexes=indexes)
        payload = b"" if message is None else encode(message)
        delivery.send_frames(client, payload, encode(delivered))
    if deliveries.stop_found:
        scheduler.send(StopFound(deliveries.stop_found))
