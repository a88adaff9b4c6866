"""Ask a gateway before a scripted ring by the unmodified openai client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses import AsyncResponseStreamManager
from openai.types.responses import Response

from quadriga.server.answer_format import AnswerFormat, ReasoningFormat, to_info
from tests.unit.scripted_ring import HERMES, ScriptedRing, openai_before

THINKING = to_info(AnswerFormat(calls=HERMES, reasoning=ReasoningFormat(), takes_tools=True))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Change files."}
ASK: Any = {"model": "tiny", "input": "Rain?"}


@asynccontextmanager
async def asking(ring: ScriptedRing, **flags: Any) -> AsyncIterator[Any]:
    """Yield OpenAI's client of a gateway before a ring."""
    async with openai_before(ring, **flags) as (client, _):
        yield client


def turns_of(ring: ScriptedRing) -> Any:
    """Return the turns of the last chat that the ring was sent."""
    return ring.submitted[-1][0]


def without_ids(response: Response) -> dict[str, Any]:
    """Return a response without what differs between two answers to one request."""
    body = response.to_dict()
    for item in body["output"]:  # type: ignore[attr-defined]
        item.pop("id")
        item.pop("call_id", None)
    differing = ("id", "created_at", "completed_at", "timings")
    return {name: value for name, value in body.items() if name not in differing}


async def stream(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Response, list[Any]]:
    """Return the final response of a stream as the client accumulates it, and its events."""
    manager: AsyncResponseStreamManager[Any] = client.responses.stream(**fields)
    async with manager as opened:
        events: list[Any] = [event async for event in opened]
        final = events[-1].response
    return final, events


def check_events(events: list[Any]) -> None:
    """Check numbers, the ids of items, and that the deltas add up to the whole values."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    added: dict[int, Any] = {}
    ended: list[Any] = []
    deltas: dict[tuple[int, str], str] = {}
    for event in events[2:-1]:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert event.output_index == len(added) == len(ended)
            added[event.output_index] = event.item
            continue
        item = added[event.output_index]
        assert getattr(event, "item_id", item.id) == item.id
        name, _, what = kind.rpartition(".")
        if what == "delta":
            key = (event.output_index, name)
            deltas[key] = deltas.get(key, "") + event.delta
        elif what == "done" and name not in ("output_item", "content_part"):
            value = next(
                getattr(event, field)
                for field in ("text", "arguments", "input")
                if hasattr(event, field)
            )
            assert deltas.get((event.output_index, name), "") == value
        elif kind == "output_item.done":
            assert event.item.id == item.id
            ended.append(event.item)
    final = events[-1].response
    assert [item.to_dict() for item in final.output] == [item.to_dict() for item in ended]
    assert final.id == events[0].response.id


async def both(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    """Return the whole answer, after a check that the streamed one is the same."""
    whole: Response = await client.responses.create(**fields)
    events = [event async for event in await client.responses.create(**fields, stream=True)]
    check_events(events)
    assert without_ids(events[-1].response) == without_ids(whole)
    return whole


async def refused(client: openai.AsyncOpenAI, param: str, match: str, **fields: Any) -> None:
    """Check that a request is a 400 that names its field."""
    with pytest.raises(openai.BadRequestError, match=match) as raised:
        await client.responses.create(**{**ASK, **fields})
    assert raised.value.param == param
