"""Calls are answered without HTTP: no socket, no web request, and a list that takes the events."""

import asyncio
import json
from typing import Any

import pytest

from http_proc.core.answering import APIS, answer
from http_proc.core.call import Call
from http_proc.core.caller import Caller
from http_proc.core.errors import ApiError
from http_proc.core.gateway import Gateway
from http_proc.core.observe import CallRecord
from http_proc.core.served_model import ServedModels
from http_proc.core.streaming import Opening
from http_proc.server import ENDPOINTS
from quadriga.errors import NonFiniteLogits, PromptTooLong, QuadrigaError, QueueFull
from quadriga.server.config.server_config import ServerConfig
from tests.unit.scripted_ring import ScriptedHandle, ScriptedRing, chunk, served

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 5, "model": "tiny"},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": CHAT | {"model": "tiny"},
    "/generate": {"text": "Hi"},
}


class Events:
    """An EventSink that is a list."""

    def __init__(self) -> None:
        self.events: list[str] = []

    async def open(self, opening: Opening) -> None:
        self.events.append(opening.framing.content_type)

    async def write(self, data: bytes | memoryview) -> None:
        self.events.append(bytes(data).decode())

    async def comment(self, line: bytes) -> None:
        self.events.append(line.decode())

    async def close(self) -> None:
        self.events.append("end")


class FailingRing(ScriptedRing):
    """A ring that fails each request behind its pieces, and then sends one more.

    Attributes:
        failing: index of the only request that fails, before it is accepted; None: all do.
    """

    def __init__(self, pieces: list[str], failure: QuadrigaError) -> None:
        super().__init__(pieces)
        self.failure = failure
        self.failing: int | None = None
        self.leaves_open = True

    def submit(self, *prompt: Any, on_accepted: Any = None, **options: Any) -> ScriptedHandle:
        if len(self.handles) == self.failing:
            on_accepted = None
        return super().submit(*prompt, on_accepted=on_accepted, **options)

    def _answer(self, handle: ScriptedHandle, sink: Any) -> None:
        loop = asyncio.get_running_loop()
        if self.failing in (None, int(handle.request_id)):
            if self.failing is None:
                super()._answer(handle, sink)
            loop.call_soon(sink, self.failure)
            loop.call_soon(sink, chunk(" late", self.completion()))
        else:
            super()._answer(handle, sink)


def ask(
    ring: ScriptedRing, path: str, stream: bool, **fields: Any
) -> tuple[bytes | None, list[str], Call]:
    """Return the body and the events of an answer, and the call."""

    async def asked() -> tuple[bytes | None, list[str], Call]:
        config = ServerConfig().replace(served_model_name="tiny")
        models = ServedModels([served(config, ring)])
        gateway, sink = Gateway(config, models), Events()
        gateway[APIS] = {one.path: one.handler for one in ENDPOINTS if one.answers}  # type: ignore
        call = Call(path, json.dumps(BODIES[path] | {"stream": stream} | fields).encode(), "r1")
        body = await answer(gateway, call, Caller("alice"), sink)
        assert gateway.num_open == 0
        return body, sink.events, call

    return asyncio.run(asyncio.wait_for(asked(), 30))


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_answer_is_the_body(path: str) -> None:
    ring = ScriptedRing(["No", " rain."])
    body, events, call = ask(ring, path, False)
    assert body is not None and b"No rain." in body and not events
    assert call.record.completions[0].text == "No rain."
    assert ring.tenants == ["alice"] and "r1" in call.record.id


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_goes_to_the_sink(path: str) -> None:
    body, events, _ = ask(ScriptedRing(["No", " rain."]), path, True)
    assert body is None and events[-1] == "end"
    assert events[0].partition(";")[0] in ("text/event-stream", "application/x-ndjson")
    assert " rain." in "".join(events[1:])


def test_an_error_is_raised_before_the_sink_is_opened() -> None:
    ring = ScriptedRing([], error=QueueFull("the queue is full", 3.0))
    with pytest.raises(ApiError, match="queue is full") as caught:
        ask(ring, "/v1/chat/completions", True)
    assert (caught.value.status, caught.value.retry_after) == (429, 3.0)


@pytest.mark.parametrize("path", BODIES)
def test_what_came_before_an_error_is_sent_before_it(path: str) -> None:
    ring = FailingRing(["No", " rain."], NonFiniteLogits("no numbers"))
    _, events, call = ask(ring, path, True)
    text, error, _ = "".join(events[1:]).partition("no numbers")
    assert error and "No" in text and " rain." in text
    assert "late" not in "".join(events) and not call.record.completions
    with pytest.raises(ApiError, match="no numbers"):
        ask(ring, path, False)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_prompt_that_is_refused_has_a_status_whatever_the_others_have(failing: int) -> None:
    ring = FailingRing(["No"], PromptTooLong("prompt has 9000 tokens"))
    ring.failing = failing
    with pytest.raises(ApiError, match="9000 tokens") as caught:
        ask(ring, "/v1/completions", True, prompt=["one", "two"])
    assert caught.value.status == 400


async def test_a_model_on_disk_answers_to_its_name_and_to_its_path() -> None:
    config = ServerConfig().replace(model="/models/tiny.gguf", served_model_name="tiny.gguf")
    only = served(config, ScriptedRing([]))
    gateway = Gateway(config, ServedModels([only]))
    for name in ("tiny.gguf", "/models/tiny.gguf", None):
        assert gateway.served(name, CallRecord()) is only
    with pytest.raises(ApiError, match=r"use 'tiny\.gguf'"):
        gateway.served("/other/tiny.gguf", CallRecord())
