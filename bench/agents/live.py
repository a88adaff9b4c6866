"""Agents that a server answers: their sessions are sent again, beside a load of other prompts.

Any server with the endpoints of the sessions can be measured. Time to the first token is that of
the first event with text, and the counts of tokens are those of the server's own usage. Servers run
one after the other, and a table has the figures of each.
"""

import argparse
import asyncio
import random
import shlex
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from bench.agents.sessions import (
    AgentSession,
    DrawnShape,
    SessionCall,
    drawn_sessions,
    read_sessions,
    text_of,
    within,
)
from bench.cli.command import EXIT_OK
from bench.client.backends import OpenAIServer
from bench.client.server import OwnServer, ServerProcess, free_port, info_of
from bench.peers.models import Weights, hugging_face_directory
from bench.peers.recipes import PEERS, Peer, PeerWorkload, Start
from bench.report.table import FigureRow, table_of
from bench.turns import variant_of
from quadriga.errors import ConfigError, RequestFailed
from quadriga.server.config.server_config import ServerConfig

READ_TIMEOUT_S = 1800.0
READY_TIMEOUT_S = 600.0
INFO_TIMEOUT_S = 5.0
MAX_PAGE_TOKENS = 64  # of the tokens that two prompts share, the last page may differ
# The weights of peers, and those of ours that are compared with them.
WEIGHTS: Weights = "bf16"
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


# --- runs of servers, one after the other --------------------------------------------------------


class Served(NamedTuple):
    """A server that runs, and the name of its model."""

    url: str
    model: str


class ReplaySide(NamedTuple):
    """What is measured.

    Attributes:
        name: in the table, and in the file of runs.
        keep_alive: how long it is asked to keep a session; "": it is not asked.
        start: starts it with an empty cache.
    """

    name: str
    keep_alive: str
    start: Callable[[], AbstractAsyncContextManager[Served]]


class AgentRun(msgspec.Struct):
    """A run, as a line of the file of runs. load: everything that two runs must share."""

    side: str
    number: int
    load: dict[str, str]
    answered: list[AnsweredCall]


async def replay(flags: argparse.Namespace, server_flags: Sequence[str]) -> int:
    """Let the sessions run on each server in turn. Return the exit code.

    Raises:
        ConfigError: there is nothing to measure, or a session cannot be read.
    """
    sessions = _sessions(flags)
    sides = [*_own_sides(flags, server_flags), *_peer_sides(flags, sessions), *_urls(flags)]
    if not sides:
        raise ConfigError('name a server: "ours: FLAGS", --peer llama-cpp or --url URL')
    load = {
        name: str(getattr(flags, name))
        for name in ("sessions", "agents", "turns", "shared", "first_prompt", "last_prompt",
                     "answer", "think_s", "load_rate", "load_prompt", "seed")
    }  # fmt: skip
    runs = known_runs(flags.json, load)
    for number in range(flags.repeat):
        for side in sides:
            if any((run.side, run.number) == (side.name, number) for run in runs):
                continue
            async with side.start() as served:
                shape = LoadShape(flags.load_rate, flags.load_prompt, flags.answer)
                replayed = SessionReplay(
                    served.url, served.model, side.keep_alive, flags.think_s, shape, flags.seed
                )
                run = AgentRun(side.name, number, load, await replayed.run(sessions))
            runs.append(run)
            if flags.json is not None:
                with flags.json.open("ab") as file:
                    file.write(msgspec.json.encode(run) + b"\n")
            print(table_of([figures([run])]), flush=True)
    num_turns = sum(len(session.calls) for session in sessions)
    print(f"\n{len(sessions)} agents with {num_turns} turns\n")
    names = dict.fromkeys(run.side for run in runs)
    of_each = {name: [run for run in runs if run.side == name] for name in names}
    print(table_of([figures(of_side) for of_side in of_each.values()]))
    print(f"\nTTFT p50 by turn, s\n\n{table_of([by_turn(each) for each in of_each.values()])}")
    return EXIT_OK


def _sessions(flags: argparse.Namespace) -> list[AgentSession]:
    if flags.sessions is None:
        shape = DrawnShape(
            flags.agents, flags.turns, flags.shared, flags.first_prompt, flags.last_prompt,
            flags.answer,
        )  # fmt: skip
        return drawn_sessions(shape, flags.seed)
    sessions = within(read_sessions(flags.sessions), flags.last_prompt)[: flags.agents]
    if not sessions:
        raise ConfigError(
            f"--sessions {flags.sessions} has no session of two turns within"
            f" {flags.last_prompt} tokens: give a larger --last-prompt"
        )
    return [AgentSession(one.name, one.calls[: flags.turns]) for one in sessions]


def known_runs(file: Path | None, load: dict[str, str]) -> list[AgentRun]:
    """Return the runs of a file that had the same load."""
    if file is None or not file.is_file():
        return []
    lines = file.read_bytes().splitlines()
    runs = [msgspec.json.decode(line, type=AgentRun) for line in lines]
    return [run for run in runs if run.load == load]


# --- servers --------------------------------------------------------------------------------------


def _own_sides(flags: argparse.Namespace, common: Sequence[str]) -> list[ReplaySide]:
    sides = []
    for text in flags.variants:
        variant = variant_of(text)
        has_model = "--model" in (*variant.flags, *common)
        model = [] if has_model else ["--model", str(hugging_face_directory("smollm2")),
                                      "--dtype", "bfloat16"]  # fmt: skip
        config = variant.config([*model, *common])
        start = partial(_own_server, config, variant.launcher, flags.logs / f"{variant.name}.log")
        sides.append(ReplaySide(f"{variant.name}, without hints", "", start))
        sides.append(ReplaySide(f"{variant.name}, with hints", flags.keep_alive, start))
    return sides


@asynccontextmanager
async def _own_server(config: ServerConfig, launcher: Path, log: Path) -> AsyncIterator[Served]:
    port = free_port()
    with OwnServer(config, log, launcher, port) as server:
        await server.wait_info()
        yield Served(f"http://127.0.0.1:{port}", config.model.shown_name)


def _peer_sides(flags: argparse.Namespace, sessions: Sequence[AgentSession]) -> list[ReplaySide]:
    if unknown := set(flags.peer) - set(PEERS):
        raise ConfigError(f"--peer {', '.join(unknown)}: it is one of {', '.join(PEERS)}")
    work = PeerWorkload(
        "agents", "smollm2", flags.last_prompt, flags.answer, len(sessions), len(sessions)
    )
    more = shlex.split(flags.peer_flags)
    return [
        ReplaySide(
            name, "", partial(_peer_server, PEERS[name], work, more, flags.logs / f"{name}.log")
        )
        for name in flags.peer
    ]


@asynccontextmanager
async def _peer_server(
    peer: Peer, work: PeerWorkload, more: Sequence[str], log: Path
) -> AsyncIterator[Served]:
    port = free_port()
    command = [*peer.command(Start(peer.install(), port, work, WEIGHTS)), *more]
    url = f"http://127.0.0.1:{port}"
    with ServerProcess(command, log, READY_TIMEOUT_S, peer.environment) as server:
        target = OpenAIServer(url)
        info = await server.wait_ready(lambda: info_of(target, "", INFO_TIMEOUT_S, INFO_TIMEOUT_S))
        yield Served(url, str(info.get("model", "smollm2")))


def _urls(flags: argparse.Namespace) -> list[ReplaySide]:
    if not flags.url:
        return []
    start = partial(_running_server, flags.url.rstrip("/"), flags.model)
    return [
        ReplaySide("url, without hints", "", start),
        ReplaySide("url, with hints", flags.keep_alive, start),
    ]


@asynccontextmanager
async def _running_server(url: str, model: str) -> AsyncIterator[Served]:
    yield Served(url, model)


# --- figures --------------------------------------------------------------------------------------


def figures(runs: Sequence[AgentRun]) -> FigureRow:
    """Return the figures of the runs of one server. Turns after the first of an agent are counted.

    new: tokens that a turn adds to the prompt before. evicted: turns of which something of the
    prompt before had to be computed again, more than the page in which it ends.
    """
    turns, others = list[AnsweredCall](), list[AnsweredCall]()
    num_new = num_evicted = 0
    for run in runs:
        last: dict[int, AnsweredCall] = {}
        for call in run.answered:
            if call.agent < 0:
                others.append(call)
                continue
            before = last.get(call.agent)
            last[call.agent] = call
            if before is None:
                continue
            turns.append(call)
            num_new += call.num_prompt - before.num_prompt
            num_evicted += before.num_prompt - call.num_cached > MAX_PAGE_TOKENS
    waited = sorted(call.ttft_s for call in turns if call.ttft_s is not None)
    of_others = sorted(call.ttft_s for call in others if call.ttft_s is not None)
    count = max(len(turns), 1)
    ends = [max((call.sent_at + call.seconds for call in run.answered), default=0) for run in runs]
    return {
        "server": runs[0].side,
        "computed a turn": round(sum(c.num_prompt - c.num_cached for c in turns) / count),
        "new": round(num_new / count),
        "sent": round(sum(call.num_prompt for call in turns) / count),
        "turns": len(turns),
        "evicted": num_evicted,
        "TTFT p50, s": percentile(waited, 50),
        "p99": percentile(waited, 99),
        "others": len(others),
        "their TTFT p50": percentile(of_others, 50),
        "their p99": percentile(of_others, 99),
        "run, s": round(statistics.mean(ends)),
    }


def by_turn(runs: Sequence[AgentRun]) -> FigureRow:
    """Return the median time to the first token of each turn."""
    waited: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for call in run.answered:
            if call.agent >= 0 and call.ttft_s is not None:
                waited[call.turn].append(call.ttft_s)
    medians = {str(turn + 1): statistics.median(waited[turn]) for turn in sorted(waited)}
    return {"server": runs[0].side, **medians}


def percentile(values: Sequence[float], rank: int) -> float | None:
    """Return a percentile of sorted values; None without any."""
    if not values:
        return None
    return values[min(len(values) - 1, round(rank / 100 * (len(values) - 1)))]
