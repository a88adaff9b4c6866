"""The soak's load at what the gateway stores: responses, batches, and streams that are resumed."""

import asyncio
import json
import random
from typing import Any

import aiohttp

from tests.faults.soak_load import TIMEOUT_S, Shape, WrongAnswer
from tests.faults.soak_web import WebClient

POLL_S = 0.2
NUM_LINES = 3  # of a batch


class StoringClient(WebClient):
    """A client that stores, reads and deletes, and breaks streams off to go on with them."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, shape: Shape, chosen: random.Random
    ) -> None:
        super().__init__(session, url, shape, chosen)
        self.actions |= {
            self.web_resume: 6,
            self.web_stored: 4,
            self.web_background: 3,
            self.web_batch: 1,
        }

    async def web_resume(self) -> str:
        """Leave a stream after some events, and read the rest of it in a new connection."""
        fields = self._fields(prompt=self._writer.text(), stream=True, resumable=True)
        seen: list[dict[str, Any]] = []
        async with self._post("completions", fields) as response:
            last = await _read_events(response, seen, 1 + self._chosen.randrange(4))
        if last:
            url = f"{self._url}/v1/streams/{seen[0]['id']}"
            headers = {"Last-Event-ID": last}
            async with self._session.get(url, headers=headers) as response:
                if response.status != 200:
                    raise WrongAnswer(f"resumed with status {response.status}")
                await _read_events(response, seen)
        ends = [choice for event in seen for choice in event["choices"] if choice["finish_reason"]]
        if len(ends) != 1:
            raise WrongAnswer(f"{len(ends)} ends in a stream that was resumed")
        return "web: resumed"

    async def web_stored(self) -> str:
        stored = await self._ask("responses", self._response_fields(store=True))
        path = f"responses/{stored['id']}"
        read = await self._get(path)
        if read["output"] != stored["output"]:
            raise WrongAnswer(f"a stored response changed: {stored} {read}")
        if not (await self._get(f"{path}/input_items"))["data"]:
            raise WrongAnswer("a stored response has no input")
        await self._delete(path)
        await self._get(path, status=404)
        return "web: stored"

    async def web_background(self) -> str:
        fields = self._response_fields(store=True, background=True)
        started = await self._ask("responses", fields)
        path = f"responses/{started['id']}"
        await self._wait_for(path, ("completed", "incomplete"))
        await self._delete(path)
        return "web: in the background"

    async def web_batch(self) -> str:
        """Answer some lines of a file, and delete what came of it."""
        lines = [
            json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions",
                        "body": self._fields(model="", prompt=self._writer.text())})
            for number in range(NUM_LINES)
        ]  # fmt: skip
        model = (await self._get("models"))["data"][0]["id"]
        text = "\n".join(lines).replace('"model": ""', json.dumps({"model": model})[1:-1])
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", text.encode(), filename="in.jsonl")
        async with self._session.post(f"{self._url}/v1/files", data=form) as response:
            uploaded = await response.json()
            if response.status != 200:
                raise WrongAnswer(f"status {response.status}: {uploaded}")
        fields = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions",
                  "completion_window": "24h"}  # fmt: skip
        batch = await self._ask("batches", fields)
        batch = await self._wait_for(f"batches/{batch['id']}", ("completed",))
        if batch["request_counts"]["completed"] != NUM_LINES:
            raise WrongAnswer(f"a batch of {NUM_LINES} lines: {batch['request_counts']}")
        for file in (uploaded["id"], batch["output_file_id"]):
            await self._delete(f"files/{file}")
        return "web: batch"

    def _response_fields(self, **fields: Any) -> dict[str, Any]:
        limit = max(16, self._writer.new_tokens())
        return {"input": self._writer.text(), "max_output_tokens": limit, **fields}

    async def _wait_for(self, path: str, statuses: tuple[str, ...]) -> Any:
        while (state := await self._get(path))["status"] not in statuses:
            if state["status"] in ("failed", "expired", "cancelled"):
                raise WrongAnswer(f"{path}: {state}")
            await asyncio.sleep(POLL_S)
        return state

    async def _get(self, path: str, status: int = 200) -> Any:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with self._session.get(f"{self._url}/v1/{path}", timeout=timeout) as response:
            answer = await response.json()
            if response.status != status:
                raise WrongAnswer(f"GET {path}: status {response.status}: {answer}")
            return answer

    async def _delete(self, path: str) -> None:
        async with self._session.delete(f"{self._url}/v1/{path}") as response:
            if response.status != 200:
                raise WrongAnswer(f"DELETE {path}: status {response.status}")


async def _read_events(
    response: aiohttp.ClientResponse, seen: list[dict[str, Any]], most: int = 10**9
) -> str:
    """Add a stream's events to `seen`, `most` at most.

    Returns:
        The id of the last event; "": the stream has ended.
    """
    last = ""
    async for line in response.content:
        if line.startswith(b"id: "):
            last = line.removeprefix(b"id: ").strip().decode()
        elif line.strip() == b"data: [DONE]":
            return ""
        elif line.startswith(b"data: "):
            seen.append(json.loads(line.removeprefix(b"data: ")))
            most -= 1
            if most == 0:
                return last
    raise WrongAnswer(f"status {response.status}, a stream without an end")
