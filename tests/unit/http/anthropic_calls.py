"""Calls of the Messages API."""

import json
from typing import Any

from tests.unit.http.calls import Answer, answer_of
from tests.unit.scripted_ring import ScriptedRing

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = [{"role": "user", "content": "Rain in Rome?"}]


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """Return the events of a stream, whose names are the types in their data."""
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, _, data = block.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def ask(
    ring: ScriptedRing,
    path: str = MESSAGES,
    headers: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
    **fields: Any,
) -> Answer:
    """Send a request, in which `fields` replace those of a simple one."""
    body = {"model": "tiny", "messages": HELLO} | fields
    if path == MESSAGES:
        body = {"max_tokens": 20} | body
    return answer_of(ring, path, body, headers, **flags or {})
