"""Calls of the Messages API."""

import json
from collections.abc import Iterator
from typing import Any

import aiohttp

from http_proc.core.gateway import Gateway
from tests.unit.scripted_ring import ScriptedRing, run_at_gateway

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: Any = [{"role": "user", "content": "Rain in Rome?"}]


class Answer:
    """A response: its status, headers and body."""

    def __init__(self, status: int, headers: Any, text: str) -> None:
        self.status = status
        self.headers = headers
        self.text = text

    @property
    def body(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, whose names are the types in their data."""
        return list(self._events())

    def _events(self) -> Iterator[dict[str, Any]]:
        for block in self.text.split("\n\n")[:-1]:
            name, _, data = block.partition("\n")
            body = json.loads(data.removeprefix("data: "))
            assert name == f"event: {body['type']}"
            yield body


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
    answers = []

    async def test(gateway: Gateway) -> None:
        url = f"http://127.0.0.1:{gateway.args.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body, headers=headers) as response,
        ):
            answers.append(Answer(response.status, response.headers, await response.text()))

    run_at_gateway(ring, test, **flags or {})
    return answers[0]
