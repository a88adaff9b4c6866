"""Agents in simulated time: the real scheduler, twice, without and with hints for the cache."""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.agents.sessions import AgentTurn, read_sessions, turns_of, within
from quadriga.server.config.server_config import ServerConfig
from simulator import cost_model
from simulator.records import Records
from simulator.trace import TraceRequest
from simulator.world import World

SHARED = 0  # id of the segment with which every agent begins: its instructions and tools


class AgentLoad(NamedTuple):
    """The requests of a run.

    Attributes:
        requests: with each turn after the one that it continues.
        turns: indexes of each agent's turns.
        num_shared: tokens with which all agents begin.
    """

    requests: list[TraceRequest]
    turns: list[list[int]]
    num_shared: int


def _turns_of_file(flags: argparse.Namespace) -> list[list[AgentTurn]]:
    sessions = within(read_sessions(flags.sessions), flags.last_prompt)
    return [turns_of(session, flags.last_prompt) for session in sessions]


def drawn_turns(flags: argparse.Namespace) -> list[list[AgentTurn]]:
    """Return turns whose prompts grow evenly."""
    growth = (flags.last_prompt - flags.first_prompt) // max(flags.turns - 1, 1)
    later = AgentTurn(max(growth - flags.answer, 1), flags.answer)
    first = AgentTurn(flags.first_prompt, flags.answer)
    return [[first, *[later] * (flags.turns - 1)]] * flags.agents


def make_load(flags: argparse.Namespace) -> AgentLoad:
    """Draw the requests of the agents, and others for about as long as the agents take."""
    source, segments = random.Random(flags.seed), itertools.count(1)
    requests = list[TraceRequest]()
    turns = list[list[int]]()
    if flags.sessions is None:
        agents, num_shared = drawn_turns(flags), flags.shared
    else:
        agents, num_shared = _turns_of_file(flags), 0
    for number, agent in enumerate(agents, start=1):
        turns.append([])
        for turn in agent:
            is_first = not turns[-1]
            own = (next(segments), turn.num_new - (num_shared if is_first else 0))
            request = TraceRequest(
                source.uniform(0, 1) * flags.think_s
                if is_first
                else source.uniform(0.2, 1.8) * flags.think_s,
                ((SHARED, num_shared), own) if is_first and num_shared else (own,),
                turn.num_answer,
                client=number,
                follows=None if is_first else turns[-1][-1],
            )
            turns[-1].append(len(requests))
            requests.append(request)
    at, end_s = 0.0, max(map(len, agents)) * flags.think_s * 1.2
    while at < end_s:
        num_tokens = source.randint(flags.load_prompt // 2, flags.load_prompt * 3 // 2)
        requests.append(TraceRequest(at, ((next(segments), num_tokens),), flags.answer))
        at += source.expovariate(flags.load_rate)
    return AgentLoad(requests, turns, num_shared)


def arrivals(load: AgentLoad, keep_s: float) -> Iterator[tuple[int, TraceRequest]]:
    """Yield the requests in the order of World.run, with turns that stay cached for `keep_s`."""
    marked = [
        (index, msgspec.structs.replace(request, keep_s=keep_s if request.client else 0.0))
        for index, request in enumerate(load.requests)
    ]
    yield from (each for each in marked if each[1].follows is not None)
    yield from sorted(
        (each for each in marked if each[1].follows is None), key=lambda each: each[1].at
    )


class AgentFigures(NamedTuple):
    """What the turns of the agents have computed, and how long they have waited.

    Attributes:
        computed: prompt tokens that were computed, per turn.
        sent: prompt tokens, per turn.
        ttft_p50_s, ttft_p99_s: time to the first token of the agents' turns.
        load_ttft_p50_s, load_ttft_p99_s: that of the other requests.
        by_quarter: median time to the first token in each quarter of the turns.
        info: the pins, from the server info.
    """

    computed: float
    sent: float
    ttft_p50_s: float
    ttft_p99_s: float
    load_ttft_p50_s: float
    load_ttft_p99_s: float
    by_quarter: list[float]
    info: dict[str, Any]


def figures(load: AgentLoad, records: Records, info: dict[str, Any]) -> AgentFigures:
    """Return the figures of a run."""
    assert not records.errors, f"requests have failed: {records.errors}"
    turns = np.array([index for indexes in load.turns for index in indexes])
    places = np.array([at / len(all_) for all_ in load.turns for at in range(len(all_))])
    waited = records["first_token"] - records["submitted"]
    others = np.ones(len(load.requests), bool)
    others[turns] = False
    sent, cached = records["prompt_tokens"][turns], records["cached_tokens"][turns]
    quarters = [waited[turns[places * 4 // 1 == quarter]] for quarter in range(4)]
    of_turns, of_others = (
        (float(np.percentile(waited[rows], 50)), float(np.percentile(waited[rows], 99)))
        for rows in (turns, others)
    )
    return AgentFigures(
        float((sent - cached).mean()),
        float(sent.mean()),
        *of_turns,
        *of_others,
        [float(np.median(quarter)) for quarter in quarters],
        {name: value for name, value in info.items() if name.startswith("cache_pin")},
    )


def ideal(load: AgentLoad, records: Records, page_size: int) -> float:
    """Return the prompt tokens that a turn computes in a pool that drops nothing."""
    computed = 0
    for number, indexes in enumerate(load.turns):
        num_known = load.num_shared + 1 if number else 1
        for index in indexes:
            num_prompt = int(records["prompt_tokens"][index])
            # The last token of a prompt or an answer is known and not computed.
            computed += num_prompt - (num_known - 1) // page_size * page_size
            num_known = num_prompt + int(records["completion_tokens"][index])
    return computed / sum(map(len, load.turns))


def simulate(flags: argparse.Namespace, config: ServerConfig) -> int:
    """Simulate, print a table, and return the exit code."""
    model, load = cost_model.load(flags.cost_model), make_load(flags)
    page_size = config.worker.page_size
    results = dict[str, AgentFigures]()
    lowest = 0.0
    for name, keep_s in (("without hints", 0.0), ("with hints", flags.keep_s)):
        world = World(config, model, flags.pool_tokens // page_size, seed=flags.seed)
        world.run(arrivals(load, keep_s))
        results[name] = figures(load, world.records, world.replicas[0].info)
        lowest = ideal(load, world.records, page_size)
    num_turns = sum(map(len, load.turns))
    print(
        f"{len(load.turns)} agents with {num_turns} turns, prompts of up to {flags.last_prompt}"
        f" tokens; {len(load.requests) - num_turns} other prompts; pool of {flags.pool_tokens}"
        f" tokens; ideal: {lowest:.0f} tokens computed a turn"
    )
    print("| | tokens computed a turn | TTFT p50 / p99 of turns, s | p50 by quarter of the turns, s"
          " | TTFT p50 / p99 of the others, s |\n|---|---|---|---|---|")  # fmt: skip
    for name, run in results.items():
        quarters = ", ".join(f"{quarter:.2f}" for quarter in run.by_quarter)
        print(
            f"| {name} | {run.computed:.0f} of {run.sent:.0f} | {run.ttft_p50_s:.2f} /"
            f" {run.ttft_p99_s:.2f} | {quarters} | {run.load_ttft_p50_s:.2f} /"
            f" {run.load_ttft_p99_s:.2f} |"
        )
    print(json.dumps(results["with hints"].info))
    return 0
