"""What the live feed has said up to now: requests with their lanes, gauges, processes, events.

First where the messages come from, the public socket or the web gateway, then the picture.
"""

import argparse
import asyncio
import http.client
import json
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from quadriga.client import async_client, live
from quadriga.errors import RequestFailed, ServerUnreachable
from quadriga.server.cli.server_api import ServerApi, events_of
from quadriga.server.processes.process_name import ProcessName
from quadriga.wire.live import (
    EventKind,
    LiveEvent,
    LiveGauges,
    LiveMessage,
    LiveProcess,
    LiveRequest,
    LiveServer,
    LiveStep,
    RowKind,
)


def add_replica(parser: argparse.ArgumentParser) -> None:
    """Add the flag that chooses the replica."""
    parser.add_argument(
        "--replica", type=int, default=0, metavar="N", help="which one, of a server with --dp"
    )


async def ring_messages(
    endpoint: str, curve_dir: str | None, replica: int
) -> AsyncGenerator[LiveMessage, None]:
    """Yield the messages of a server's public socket."""
    async with async_client.AsyncClient(endpoint, curve_dir=curve_dir) as client:
        async for message in client.watch(replica):
            yield message


async def gateway_messages(url: str, key: str, replica: int) -> AsyncGenerator[LiveMessage, None]:
    """Yield the messages of GET /v1/live.

    Raises:
        ServerUnreachable: there is no server, or the connection broke.
        CallRefused: the server refuses, for example because a key is missing.
    """
    call = ServerApi(url, key).call("GET", f"/live?replica={replica}")
    try:
        lines = await asyncio.to_thread(call.__enter__)
        events = events_of(iter(lines.readline, b""))
        while event := await asyncio.to_thread(next, events, None):
            if event[0] == "live":
                for message in _decode(event[1]):
                    yield message
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServerUnreachable(f"the connection to {url} broke: {error}") from None
    finally:
        call.hang_up()
    raise ServerUnreachable(f"{url} has ended the stream: the server stops")


def _decode(data: str) -> list[LiveMessage]:
    body = json.loads(data)
    try:
        messages: list[LiveMessage] = [live.step_from_json(step) for step in body["steps"]]
        if body["server"] is not None:
            messages.append(live.server_from_json(body["server"]))
    except msgspec.ValidationError as error:
        raise RequestFailed(
            f"the server speaks another version of the live feed: {error}; use the quadriga of"
            " its release"
        ) from None
    return messages


WORKER = "worker_proc"
LANE_STEPS = 200
MAX_EVENTS = 100
RATE_WINDOW_S = 5.0
NUM_STEP_TIMES = 64

NO_CELL, WAITING, RETRACTED = " ", ".", "x"
CELLS = {RowKind.DECODE: "d", RowKind.PREFILL: "P", RowKind.CHUNK: "p", RowKind.RECOMPUTE: "r"}


@dataclass(slots=True)
class RequestRow:
    """A request that has not ended.

    Attributes:
        doing: kind of its last row, or the reason why it was in no row of the last step.
        is_running: it was in the last step.
        num_generated: tokens that it has generated, with those of planned steps.
        lane: a character for each of the last steps, the newest last.
    """

    about: LiveRequest
    doing: str = ""
    is_running: bool = False
    num_generated: int = 0
    lane: deque[str] = field(default_factory=lambda: deque(maxlen=LANE_STEPS))


@dataclass(slots=True)
class ProcessRow:
    """A process, and the share of a core that it uses; None until it was read twice."""

    about: LiveProcess
    cpu_share: float | None = None


class Picture:
    """The state of a server, as far as the feed has said it.

    Attributes:
        rows: the requests by number.
        gauges: the last ones; None before the first step.
        processes: by process id.
        events: time and text of the last ones, oldest first.
        server: the last LiveServer.
        num_lost: messages of the feed that did not arrive.
        is_complete: all requests are known, and processes were read.
    """

    def __init__(self) -> None:
        self.rows: dict[int, RequestRow] = {}
        self.gauges: LiveGauges | None = None
        self.processes: dict[int, ProcessRow] = {}
        self.events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self.server: LiveServer | None = None
        self.num_hidden = 0
        self.num_lost = 0
        self._has_whole = False
        self._next_number = -1
        self._rates: deque[tuple[float, LiveGauges]] = deque()
        self._step_times: deque[float] = deque(maxlen=NUM_STEP_TIMES)

    @property
    def is_complete(self) -> bool:
        """Whether all requests are known, and the processes, too."""
        return self._has_whole and self.server is not None

    def take(self, message: LiveMessage) -> None:
        """Add a message to the picture."""
        if isinstance(message, LiveStep):
            self._take_step(message)
        else:
            self._take_server(message)

    # --- steps ------------------------------------------------------------------------------------

    def _take_step(self, step: LiveStep) -> None:
        if 0 <= self._next_number < step.number:
            self.num_lost += step.number - self._next_number
        self._next_number = step.number + 1
        self.gauges = step.gauges
        self.num_hidden = step.num_hidden_rows + step.num_hidden_skipped
        self._describe(step)
        for event in step.events:
            self._take_event(step.time, event)
        if step.step >= 0 or step.skipped:
            self._add_column(step)
        self._step_times.extend(
            ended - began for began, ended in zip(step.began_at, step.ended_at, strict=True)
        )
        self._rates.append((step.time, step.gauges))
        while self._rates[-1][0] - self._rates[0][0] > RATE_WINDOW_S:
            self._rates.popleft()

    def _describe(self, step: LiveStep) -> None:
        for request in step.requests:
            row = self.rows.get(request.seq)
            if row is None:
                row = self.rows[request.seq] = RequestRow(request)
            row.about, row.num_generated = request, request.num_generated_tokens
        if step.is_whole:
            self._has_whole = True
            listed = {request.seq for request in step.requests}
            # Messages without a step do not list the requests that run.
            if step.step >= 0 or not step.gauges.running:
                self.rows = {seq: row for seq, row in self.rows.items() if seq in listed}

    def _take_event(self, time: float, event: LiveEvent) -> None:
        row = self.rows.get(event.seq)
        name = f"#{event.seq}" if row is None else row.about.request_id
        self.events.append((time, event_text(event, name)))
        if event.kind in (EventKind.FINISHED, EventKind.REFUSED):
            self.rows.pop(event.seq, None)
        elif row is not None and event.kind is EventKind.RETRACTED:
            row.lane.append(RETRACTED)

    def _add_column(self, step: LiveStep) -> None:
        cells: dict[int, tuple[str, str, bool]] = {
            seq: (reason.value, WAITING, False)
            for reason, seqs in step.skipped.items()
            for seq in seqs
        }
        for seq, kind in zip(step.seqs, step.kinds, strict=True):
            cells[seq] = kind.name.lower(), CELLS[kind], True
        for seq, row in self.rows.items():
            row.doing, cell, row.is_running = cells.get(seq, (row.doing, NO_CELL, False))
            row.lane.append(cell)
        for seq, kind, count in zip(step.seqs, step.kinds, step.num_tokens, strict=True):
            if kind is RowKind.DECODE and seq in self.rows:
                self.rows[seq].num_generated += count

    # --- rates ------------------------------------------------------------------------------------

    def rate(self, name: str) -> float:
        """Return how much a total of the gauges has grown per second, lately."""
        if len(self._rates) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._rates[0], self._rates[-1]
        seconds = last_at - first_at
        if self.server is not None:  # an idle server makes no steps
            seconds = max(seconds, min(RATE_WINDOW_S, self.server.time - first_at))
            if self.server.time - last_at > RATE_WINDOW_S:
                return 0.0
        grown = getattr(last, name) - getattr(first, name)
        return float(max(0, grown) / seconds) if seconds > 0 else 0.0

    @property
    def step_ms(self) -> float:
        """Median duration of the last steps in ms; 0.0 before the first."""
        times = sorted(self._step_times)
        return 1000 * times[len(times) // 2] if times else 0.0

    # --- processes --------------------------------------------------------------------------------

    @property
    def models(self) -> dict[str, bool]:
        """The models of a server with several, and whether a worker of theirs runs."""
        found: dict[str, bool] = {}
        for row in self.processes.values():
            name = ProcessName.parse(row.about.name)
            if name.model:
                is_worker = name.program == WORKER
                found[name.model] = found.get(name.model, False) or is_worker
        return found

    def _take_server(self, server: LiveServer) -> None:
        before, self.server = self.server, server
        seconds = 0.0 if before is None else server.time - before.time
        rows = {}
        for process in server.processes:
            known = self.processes.get(process.pid)
            rows[process.pid] = row = ProcessRow(process)
            if known is not None and seconds > 0:
                row.cpu_share = (process.cpu_seconds - known.about.cpu_seconds) / seconds
            elif before is not None and known is None:
                self.events.append((server.time, f"{process.name} was started (pid {process.pid})"))
        for pid, row in self.processes.items():
            if pid not in rows:
                self.events.append((server.time, f"{row.about.name} has ended (pid {pid})"))
        self.processes = rows


def event_text(event: LiveEvent, name: str) -> str:
    """Return an event as a line for a person."""
    match event.kind:
        case EventKind.ADMITTED:
            cached = f", {event.detail} tokens cached" if event.detail != "0" else ""
            return f"{name} admitted{cached}"
        case EventKind.FINISHED:
            return f"{name} finished: {event.detail}"
        case EventKind.REFUSED:
            return f"{name} refused: {event.detail}"
        case EventKind.RETRACTED:
            return f"{name} retracted: others need its pages"
