"""Agents that a server answers: their sessions are sent again, beside a load of other prompts.

Any server with the endpoints of the sessions can be measured. Time to the first token is that of
the first event with text, and the counts of tokens are those of the server's own usage.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.agents.sessions import AgentSession, SessionCall, text_of
from quadriga.errors import RequestFailed

READ_TIMEOUT_S = 1800.0
MAX_SHOWN_CHARS = 300
COMPLETIONS = "/v1/completions"
# Events of a stream that have text, by the field `type` of Anthropic's and of the Responses API.
TEXT_EVENTS = frozenset(
    {
        "content_block_delta", "response.output_text.delta", "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
    }
)  # fmt: skip


class LoadShape(NamedTuple):
    """A load of other prompts.

    Attributes:
        rate: requests a second, at random times; 0: none.
        num_tokens: mean length of a prompt.
        answer: tokens of an answer.
    """

    rate: float
    num_tokens: int
    answer: int


class AnsweredCall(NamedTuple):
    """What is known of an answer. Times are seconds.

    Attributes:
        agent: number of the agent; -1: of the other prompts.
        turn: from 0.
        sent_at: from the begin of the run.
        ttft_s: None where no text has come.
        num_prompt, num_cached, num_generated: tokens.
    """

    agent: int
    turn: int
    sent_at: float
    ttft_s: float | None
    seconds: float
    num_prompt: int
    num_cached: int
    num_generated: int


def request_of(call: SessionCall, model: str) -> dict[str, Any]:
    """Return the body that is sent: that of a call, as a stream of the recorded length."""
    body = {**call.body, "model": model, "stream": True}
    most = max(call.num_generated_tokens, 1)
    if call.path == "/v1/messages":
        return body | {"max_tokens": most}
    if call.path == "/v1/responses":
        return body | {"max_output_tokens": most}
    body.pop("max_completion_tokens", None)
    return body | {
        "max_tokens": most, "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


class _Usage(NamedTuple):
    num_prompt: int
    num_cached: int
    num_generated: int


def usage_of(event: Mapping[str, Any]) -> _Usage | None:
    """Return the usage in an event of any of the APIs; None without one."""
    inner = event.get("response") or event.get("message") or event
    usage = event.get("usage") or inner.get("usage")
    if not usage:
        return None
    if (num_prompt := usage.get("prompt_tokens")) is not None:
        details = usage.get("prompt_tokens_details") or {}
        return _Usage(num_prompt, details.get("cached_tokens") or 0, usage["completion_tokens"])
    details = usage.get("input_tokens_details") or {}
    read = usage.get("cache_read_input_tokens")
    cached = details.get("cached_tokens") or 0 if read is None else read
    num_prompt = usage.get("input_tokens", 0)
    if read is not None:  # Anthropic counts what was read and written apart
        num_prompt += read + (usage.get("cache_creation_input_tokens") or 0)
    return _Usage(num_prompt, cached, usage.get("output_tokens", 0))


def has_text(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a stream brings text, reasoning or a call."""
    if event.get("type") in TEXT_EVENTS:
        return True
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        texts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
        if any(texts) or delta.get("tool_calls"):
            return True
    return False


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of a stream's events."""
    async for line in response.content:
        data = line.strip().removeprefix(b"data:").strip()
        if data.startswith(b"{") and line.startswith(b"data:"):
            yield msgspec.json.decode(data)


class SessionReplay:
    """Send the sessions of agents to a server, and other prompts beside them.

    Args:
        url: of the server.
        model: name of its model.
        keep_alive: how long the server is asked to keep a session, such as 1h; "": it is not.
        think_s: mean time between the end of an answer and the next turn.
        load: the other prompts.
        seed: of the times and the other prompts.
    """

    def __init__(
        self,
        url: str,
        model: str,
        keep_alive: str,
        think_s: float,
        load: LoadShape,
        seed: int,
    ) -> None:
        self._url, self._model = url, model
        self._keep_alive = keep_alive
        self._think_s, self._load, self._seed = think_s, load, seed
        self._began_at = 0.0
        self.answered: list[AnsweredCall] = []

    async def run(self, sessions: Sequence[AgentSession]) -> list[AnsweredCall]:
        """Return what became of each call, when all agents have ended.

        Raises:
            RequestFailed: a request has failed.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            self._began_at = time.monotonic()
            tasks = [
                asyncio.create_task(self._play(http, number, session))
                for number, session in enumerate(sessions)
            ]
            others = asyncio.create_task(self._send_others(http))
            playing = asyncio.gather(*tasks)
            try:
                await asyncio.wait((playing, others), return_when=asyncio.FIRST_COMPLETED)
                if others.done() and self._load.rate:
                    await others  # it ends only by an error
                await playing
            finally:
                for task in (*tasks, others):
                    task.cancel()
                await asyncio.gather(*tasks, others, return_exceptions=True)
        return self.answered

    async def _play(self, http: aiohttp.ClientSession, number: int, session: AgentSession) -> None:
        source = random.Random(f"{self._seed} agent {number}")
        headers = {"X-Session-Id": f"bench-{number}"}
        if self._keep_alive:
            headers["X-Session-Keep-Alive"] = self._keep_alive
        for turn, call in enumerate(session.calls):
            share = source.uniform(0, 1) if turn == 0 else source.uniform(0.5, 1.5)
            await asyncio.sleep(share * self._think_s)
            self.answered.append(await self._ask(http, call, headers, number, turn))

    async def _send_others(self, http: aiohttp.ClientSession) -> None:
        if not self._load.rate:
            return
        source = random.Random(f"{self._seed} load")
        sent: set[asyncio.Task[None]] = set()
        try:
            while True:
                size = source.randint(self._load.num_tokens // 2, self._load.num_tokens * 3 // 2)
                body = {"prompt": text_of(source, size)}
                call = SessionCall(COMPLETIONS, body, 0, self._load.answer)
                sent.add(asyncio.create_task(self._ask_other(http, call)))
                await asyncio.sleep(source.expovariate(self._load.rate))
                for task in [task for task in sent if task.done()]:
                    sent.remove(task)
                    await task
        finally:
            for task in sent:
                task.cancel()
            await asyncio.gather(*sent, return_exceptions=True)

    async def _ask_other(self, http: aiohttp.ClientSession, call: SessionCall) -> None:
        self.answered.append(await self._ask(http, call, {}, -1, 0))

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        call: SessionCall,
        headers: Mapping[str, str],
        agent: int,
        turn: int,
    ) -> AnsweredCall:
        body, began_at = request_of(call, self._model), time.monotonic()
        first_at, usage = 0.0, _Usage(0, 0, 0)
        async with http.post(self._url + call.path, json=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:MAX_SHOWN_CHARS]
                raise RequestFailed(f"agent {agent}, turn {turn}: {response.status}: {text}")
            async for event in events_of(response):
                if not first_at and has_text(event):
                    first_at = time.monotonic()
                usage = usage_of(event) or usage
                if "error" in event:
                    raise RequestFailed(f"agent {agent}, turn {turn}: {event['error']}")
        return AnsweredCall(
            agent,
            turn,
            round(began_at - self._began_at, 3),
            round(first_at - began_at, 4) if first_at else None,
            round(time.monotonic() - began_at, 4),
            *usage,
        )
