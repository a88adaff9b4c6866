"""The soak's load at the web gateway."""

import asyncio
import json
import random
from contextlib import suppress
from typing import Any

import aiohttp

from tests.faults.soak_load import SCHEMA, TIMEOUT_S, Action, Shape, Writer, WrongAnswer


class WebClient:
    """A client of the gateway at `url`, which has no slash at the end."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, shape: Shape, chosen: random.Random
    ) -> None:
        self._session = session
        self._url = url
        self._shape = shape
        self._chosen = chosen
        self._writer = Writer(shape, chosen)
        self.actions: dict[Action, int] = {
            self.web_stream: 10,
            self.web_chat: 8,
            self.web_vanish: 4,
            self.web_schema: 2,
            self.web_several: 1,
            self.web_too_long: 1,
            self.web_questions: 1,
        }

    def _fields(self, **fields: Any) -> dict[str, Any]:
        temperature = self._chosen.choice([0.0, 0.8, 1.0])
        common = {"max_tokens": self._writer.new_tokens(), "ignore_eos": True}
        return common | {"temperature": temperature} | fields

    def _post(self, path: str, fields: dict[str, Any], timeout_s: float = TIMEOUT_S) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return self._session.post(f"{self._url}/v1/{path}", json=fields, timeout=timeout)

    async def _ask(self, path: str, fields: dict[str, Any], status: int = 200) -> Any:
        async with self._post(path, fields) as response:
            answer = await response.json()
            if response.status != status:
                raise WrongAnswer(f"status {response.status}: {answer}")
            return answer

    async def web_stream(self) -> str:
        options = {"include_usage": True}
        fields = self._fields(prompt=self._writer.text(), stream=True, stream_options=options)
        async with self._post("completions", fields) as response:
            events = [line async for line in response.content if line.startswith(b"data: ")]
        if len(events) < 2 or events[-1].strip() != b"data: [DONE]":
            raise WrongAnswer(f"status {response.status}, a stream without an end: {events[-1:]}")
        last = json.loads(events[-2].removeprefix(b"data: "))
        usage = last.get("usage")
        if usage is None:
            raise WrongAnswer(f"a stream without its usage: {last}")
        if usage["completion_tokens"] != fields["max_tokens"]:
            raise WrongAnswer(f"{fields['max_tokens']} tokens were requested: {usage}")
        return "web: finished"

    async def web_chat(self) -> str:
        messages = [{"role": "user", "content": self._writer.text()}]
        answer = await self._ask("chat/completions", self._fields(messages=messages))
        if answer["choices"][0]["finish_reason"] != "length":
            raise WrongAnswer(f"a chat ended too early: {answer}")
        return "web: finished"

    async def web_vanish(self) -> str:
        """Close the connection in mid-stream, or before the first event."""
        fields = self._fields(prompt=self._writer.text(), stream=True)
        fields["max_tokens"] = self._shape.longest // 2
        timeout_s = TIMEOUT_S if self._chosen.random() < 0.7 else 0.02
        with suppress(asyncio.TimeoutError):
            async with self._post("completions", fields, timeout_s) as response:
                await response.content.readline()
                response.close()
        return "web: vanished"

    async def web_schema(self) -> str:
        described = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
        messages = [{"role": "user", "content": self._writer.text()}]
        fields = self._fields(messages=messages, response_format=described, ignore_eos=False)
        choice = (await self._ask("chat/completions", fields))["choices"][0]
        if choice["finish_reason"] == "stop":
            json.loads(choice["message"]["content"])
        return "web: finished"

    async def web_several(self) -> str:
        fields = self._fields(prompt=self._writer.text(), n=2)
        answer = await self._ask("completions", fields)
        if answer["usage"]["completion_tokens"] != 2 * fields["max_tokens"]:
            raise WrongAnswer(f"{fields['max_tokens']} tokens of two choices expected: {answer}")
        return "web: finished"

    async def web_too_long(self) -> str:
        prompt = self._writer.ids(self._shape.context_length + 1)
        await self._ask("completions", self._fields(prompt=prompt), status=400)
        return "web: refused: too long"

    async def web_questions(self) -> str:
        for path in ("readyz", "metrics", "v1/models"):
            async with self._session.get(f"{self._url}/{path}") as response:
                await response.read()
                if response.status != 200:
                    raise WrongAnswer(f"{path} answered with status {response.status}")
        return "web: answered"
