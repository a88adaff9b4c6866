"""The detokenizer process: blocks until a step's token ids arrive, and sends each client its text.

Its messages go to the tokenizer process, as quadriga/wire/to_detok.py says. `step_news` makes what
the frontend has to note of a step before its texts; `open_traces` and `close_traces` are of the
traced requests that end.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from detok_proc.detokenizer import Deliveries, Detokenizer
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.server.models.resolve import resolve_model
from quadriga.server.processes.child import Child, run_child
from quadriga.server.processes.control_channel import ControlChannel
from quadriga.wire.client import Chunk, Chunks, Info, Replay, encode_chunks
from quadriga.wire.sockets import Inbox, Outbox, Poller, encode
from quadriga.wire.to_detok import (
    Delivered,
    DetokMessage,
    Drained,
    ForgetStreams,
    HandedBack,
    HeldChoice,
    InfoReply,
    KnownRequests,
    LiveFrame,
    ProgressReply,
    ReplicaNews,
    SchedulerRestarted,
    StepNews,
    StepOutput,
    StopDetok,
    StreamReplay,
    StreamStart,
    Withdrawn,
)
from quadriga.wire.to_scheduler import DetokReady, StopFound
from quadriga.wire.trace import RequestTrace, Span


def step_news(output: StepOutput, news: ReplicaNews) -> StepNews:
    """Return what the frontend has to note before it passes the texts of a step on."""
    started = [_held(start, start.given_ids, output.time) for start in output.opened]
    if output.replayed and not news.restates:
        replayed = [
            _replayed(replay, output.time) for replay in output.replayed if _is_open(replay)
        ]
        news = msgspec.structs.replace(news, held=[*replayed, *news.held])
    logprobs = output.logprobs if news.hands_over else None
    return StepNews(news, started, output.seqs, output.token_ids, logprobs)


def _is_open(replay: StreamReplay) -> bool:
    return replay.closing is None


def _replayed(replay: StreamReplay, time: float) -> HeldChoice:
    return _held(replay.opening, replay.token_ids, time if replay.token_ids else 0.0)


def _held(start: StreamStart, token_ids: bytes, first_token_at: float) -> HeldChoice:
    return HeldChoice(
        start.seq, start.client, start.request_id, start.index, token_ids, first_token_at,
        start.placement,
    )  # fmt: skip


TraceKey = tuple[bytes, str, int]  # client, id of the request, number of the choice


def open_traces(output: StepOutput) -> dict[TraceKey, RequestTrace]:
    """Return the traces of the traced requests that end with this output.

    The trace of an end that is sent again, to a new detokenizer or frontend, says so.
    """
    replayed = [replay.closing for replay in output.replayed if replay.closing is not None]
    for end in replayed:
        if end.trace is not None:
            end.trace.attributes["quadriga.replayed"] = True
    ends = [*output.closed, *replayed]
    return {(e.client, e.request_id, e.index): e.trace for e in ends if e.trace is not None}


def close_traces(
    traces: dict[TraceKey, RequestTrace], client: bytes, chunks: Iterable[Chunk]
) -> list[RequestTrace]:
    """Return the traces of a client's requests that end with these chunks, with a span more."""
    closed = []
    for chunk in chunks:
        if chunk.end is None:
            continue
        trace = traces.pop((client, chunk.request_id, chunk.index), None)
        if trace is not None:
            began_at = trace.ended_at
            ended_at = max(began_at, chunk.end.times.detokenized)
            trace.spans.append(Span("detokenize", "detok_proc", began_at, ended_at))
            closed.append(trace)
    return closed


def main() -> None:
    """Run `python -m detok_proc`, at a lower priority than the worker."""
    run_child("detok_proc", body, low_priority=True)


def body(child: Child) -> None:
    """Load the tokenizer and serve. Bind first, so that no message of the start is lost."""
    inbox = Inbox[DetokMessage](child.endpoints.detok, DetokMessage)
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
    loop = DetokenizerLoop(detokenizer, delivery, scheduler)
    while True:
        poller.wait(0.0 if loop.has_work else None)
        control.read_commands()
        loop.work()
        for message in inbox.drain():
            if isinstance(message, StopDetok):
                severity = logging.WARNING if detokenizer.num_open else logging.DEBUG
                logging.log(severity, "stopping with %d open requests", detokenizer.num_open)
                return
            loop.handle(message)


class DetokenizerLoop:
    """What the process does with each message, without the sockets.

    Args:
        detokenizer: holds the texts.
        delivery: to the frontend.
        scheduler: to the scheduler.
    """

    def __init__(self, detokenizer: Detokenizer, delivery: Outbox, scheduler: Outbox) -> None:
        self._detokenizer = detokenizer
        self._delivery = delivery
        self._scheduler = scheduler
        self._traces: dict[TraceKey, RequestTrace] = {}
        self._held: deque[HandedBack] = deque()
        self.begin_session()

    @property
    def num_open(self) -> int:
        """Number of open requests, each choice counted."""
        return self._detokenizer.num_open

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return self._detokenizer.has_work

    def begin_session(self) -> None:
        """Forget every text and ask the scheduler to replay what runs."""
        self._traces.clear()
        self._session = _begin_session(self._detokenizer, self._scheduler)

    def handle(self, message: DetokMessage) -> None:
        """Handle a message of the scheduler."""
        match message:
            case SchedulerRestarted():
                self.begin_session()
            case StepOutput():
                if message.session == self._session:
                    self._handle_step(message)
            case HandedBack():
                self._detokenizer.forget(message.seqs)
                self._held.append(message)
                self._pass_on_held()
            case Withdrawn():
                self._detokenizer.forget(message.seqs)
                self._delivery.send_frames(*_passed_on(message))
            case ForgetStreams():
                self._detokenizer.forget(message.seqs)
            case InfoReply() | ProgressReply() | LiveFrame() | Drained() | KnownRequests():
                self._delivery.send_frames(*_passed_on(message))

    def work(self) -> bool:
        """Do a slice of what may take long. Return whether there was something to do."""
        if not self._detokenizer.has_work:
            return False
        self._deliver(self._detokenizer.work(), None, None)
        self._pass_on_held()
        return True

    def _pass_on_held(self) -> None:
        """Say that requests were given up, once everything before that has gone out."""
        while self._held and not self._detokenizer.has_ends:
            self._delivery.send_frames(*_passed_on(self._held.popleft()))

    def _handle_step(self, output: StepOutput) -> None:
        deliveries = self._detokenizer.process(output)
        if output.news is not None:
            self._delivery.send_frames(b"", b"", encode(step_news(output, output.news)))
        if output.closed or output.replayed:
            self._traces.update(open_traces(output))
        self._deliver(deliveries, output.waiting, output.wait_s)

    def _deliver(self, deliveries: Deliveries, waiting: int | None, wait_s: float | None) -> None:
        """Send what a step has brought: one message per client, and the stops for the scheduler.

        The last message lists all ends of the step, because only then all of them are on their way.
        Of the ends of lost clients the frontend gets the Delivered alone.

        Args:
            deliveries: the chunks.
            waiting: as in Delivered.
            wait_s: as in Delivered.
        """
        sent: list[tuple[bytes, type[Replay | Chunks] | None, list[Chunk]]] = [
            *((client, Replay, chunks) for client, chunks in deliveries.replays.items()),
            *((client, Chunks, chunks) for client, chunks in deliveries.by_client.items()),
            *((client, None, chunks) for client, chunks in deliveries.lost.items()),
        ]
        for number, (client, kind, chunks) in enumerate(sent, start=1):
            ended = [chunk for chunk in chunks if chunk.end is not None]
            delivered = Delivered(
                ended=[chunk.request_id for chunk in ended],
                waiting=waiting,
                settled=deliveries.ended if number == len(sent) else {},
                generated=[chunk.end.usage.completion_tokens for chunk in ended if chunk.end],
                wait_s=wait_s,
                traces=close_traces(self._traces, client, chunks) if self._traces else [],
                lost=kind is None,
                indexes=[chunk.index for chunk in ended],
                placements=[
                    deliveries.placements[client, chunk.request_id, chunk.index] for chunk in ended
                ],
                session=self._session,
            )
            payload = b"" if kind is None else encode_chunks(kind(chunks))
            self._delivery.send_frames(client, payload, encode(delivered))
        if deliveries.stop_found:
            self._scheduler.send(StopFound(deliveries.stop_found))


def _passed_on(
    message: InfoReply
    | ProgressReply
    | LiveFrame
    | Drained
    | HandedBack
    | Withdrawn
    | KnownRequests,
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
        case Withdrawn() | KnownRequests():
            return b"", encode(message), b""
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
