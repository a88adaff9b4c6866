"""What a viewer that comes later sees of the last minutes: gauges by the second, and events.

It is kept only while there are viewers, and has a fixed size.
"""

from collections import deque
from typing import Any

import msgspec

from quadriga.wire.messages.live import LiveServer, LiveStep

HISTORY_S = 600
MAX_EVENTS = 300
GAUGES = (
    "running",
    "waiting",
    "pages_free",
    "pages_cached",
    "pages_held",
    "steps",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "retractions",
)  # fmt: skip


class LiveHistory:
    """Gauges of the last minutes, one row a second, and the last events."""

    def __init__(self) -> None:
        self._rows: deque[list[float]] = deque(maxlen=HISTORY_S)
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._gauges: list[float] = []
        self._names: dict[int, str] = {}

    def on_step(self, step: LiveStep) -> None:
        """Take in a step."""
        self._gauges = [getattr(step.gauges, name) for name in GAUGES]
        if step.is_whole and not step.num_hidden_rows and not step.num_hidden_skipped:
            listed = {request.seq for request in step.requests}
            ended = {event.seq for event in step.events}
            self._names = {
                seq: name for seq, name in self._names.items() if seq in listed or seq in ended
            }
        for request in step.requests:
            self._names[request.seq] = request.request_id
        for event in step.events:
            about = {"time": step.time, "request_id": self._names.get(event.seq, "")}
            self._events.append(about | msgspec.structs.asdict(event))

    def on_server(self, server: LiveServer) -> None:
        """Take in a second."""
        if self._gauges:
            self._rows.append([server.time, *self._gauges])

    def as_json(self) -> dict[str, Any]:
        """Return rows, with the names of their columns, and events, oldest first."""
        return {
            "columns": ["time", *GAUGES],
            "rows": list(self._rows),
            "events": list(self._events),
        }
