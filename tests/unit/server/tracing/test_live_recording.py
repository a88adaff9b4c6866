"""The live feed as a file for ui.perfetto.dev."""

import json
from typing import Any

import msgspec
import pytest

from quadriga.server.tracing import chrome
from quadriga.server.tracing.chrome import LiveRecording
from quadriga.wire.live import (
    EventKind,
    LiveEvent,
    LiveMessage,
    LiveProcess,
    LiveServer,
    RowKind,
    SkipReason,
)
from tests.unit.live_messages import make_request, make_step
from tests.unit.server.tracing.spans import ended

CHUNK, DECODE = RowKind.CHUNK, RowKind.DECODE


def recorded(*messages: LiveMessage) -> dict[str, Any]:
    recording = LiveRecording()
    for message in messages:
        recording.add(message)
    result: dict[str, Any] = json.loads(msgspec.json.encode(recording.trace()))
    tracks = {e["pid"]: e["args"]["name"] for e in result["traceEvents"]
              if e["name"] == "process_name"}  # fmt: skip
    for event in result["traceEvents"]:
        event["track"] = tracks[event["pid"]]
    return result


def of_kind(result: dict[str, Any], kind: str, track: str) -> list[dict[str, Any]]:
    return [e for e in result["traceEvents"] if e["ph"] == kind and e["track"] == track]


def test_a_step_is_on_the_workers_track_and_its_rows_are_on_those_of_their_requests() -> None:
    waiting = {SkipReason.PAGES: [3]}
    events = [LiveEvent(EventKind.ADMITTED, 2, "4")]
    requests = [make_request(seq) for seq in (1, 2, 3)]
    first = ended(make_step(0, {1: DECODE, 2: CHUNK}, waiting, requests, events))
    result = recorded(first, ended(make_step(1, {1: DECODE}, time=4.6), 0))
    (step,) = of_kind(result, "X", "worker_proc")
    assert (step["ts"], step["dur"]) == (0.0, 5e5)
    assert step["args"]["decode"] == step["args"]["chunk"] == step["args"]["waiting_pages"] == 1
    rows = {event["tid"]: event["name"] for event in of_kind(result, "X", "requests")}
    assert rows == {2: "decode", 3: "chunk", 4: "waits: pages"}
    (admitted,) = of_kind(result, "i", "requests")
    assert (admitted["name"], admitted["tid"], admitted["args"]) == (
        "admitted", 3, {"detail": "4"},
    )  # fmt: skip
    threads = {e["tid"]: e["args"]["name"] for e in result["traceEvents"]
               if e["name"] == "thread_name"}  # fmt: skip
    assert threads == {2: "r1 choice 0", 3: "r2 choice 0", 4: "r3 choice 0"}


def test_processes_have_counters_of_cpu_and_memory() -> None:
    def server(time: float, cpu_s: float) -> LiveServer:
        processes = [LiveProcess(n, 7, cpu_s, 50_000_000, 1.0) for n in ("worker_proc/1", "x")]
        return LiveServer(time, processes, 0, 0, 1, 0)

    result = recorded(server(4.0, 1.0), server(5.0, 1.5))
    counters = of_kind(result, "C", "worker_proc/1")
    assert [e["args"]["value"] for e in counters if e["name"] == "cpu %"] == [50.0]
    assert [e["args"]["value"] for e in counters if e["name"] == "memory MB"] == [50.0, 50.0]


def test_lost_messages_are_counted_and_a_new_scheduler_begins_again() -> None:
    recording = LiveRecording()
    steps = [ended(make_step(number, {1: DECODE})) for number in (0, 3, 0, 1)]
    for message in (*steps[:3], ended(steps[3], 3), ended(make_step(2), 1)):
        recording.add(message)
    assert recording.num_lost == 2
    assert recording.num_steps == 1, "step 3 was of the scheduler before"


def test_a_recording_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome, "MAX_EVENTS", 20)
    recording = LiveRecording()
    for number in range(100):
        recording.add(make_step(number, {1: DECODE}))
    assert recording.is_full
    assert len(recording.trace().traceEvents) < 100
