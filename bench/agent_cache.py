"""Simulate agents whose turns keep their prompts cached: `python -m bench.agent_cache`.

Agents of several turns run beside a load of unrelated prompts, which fills the KV pool while the
agents wait for their tools. Each turn's prompt is that of the turn before, its answer, and new
text. The run is simulated twice with the real scheduler in virtual time: as it is, and with turns
that ask to stay cached (CacheHint). Reported are the prompt tokens that agents' turns computed,
beside those of a pool without a bound, and the time to the first token. Flags of the server follow
`--`.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench.cli.command import command_parser, run_command
from bench.client.server import config_of
from quadriga.server.config.server_config import ServerConfig
from simulator import cost_model
from simulator.records import Records
from simulator.trace import TraceRequest
from simulator.world import World

SHARED = 0  # id of the segment with which every agent begins: its instructions and tools
ONE_HOUR_S = 3600.0


class AgentLoad(NamedTuple):
    """The requests of a run.

    Attributes:
        requests: with each turn after the one that it continues.
        turns: indexes of each agent's turns.
    """

    requests: list[TraceRequest]
    turns: list[list[int]]


def make_load(flags: argparse.Namespace) -> AgentLoad:
    """Draw the requests of the agents, and others for about as long as the agents take."""
    source, segments = random.Random(flags.seed), itertools.count(1)
    requests = list[TraceRequest]()
    turns = list[list[int]]()
    growth = (flags.last_prompt - flags.first_prompt) // max(flags.turns - 1, 1)
    for agent in range(flags.agents):
        turns.append([])
        own = flags.first_prompt - flags.shared
        begin = TraceRequest(
            source.uniform(0, flags.think_s),
            ((SHARED, flags.shared), (next(segments), own)),
            flags.answer,
            client=agent + 1,
        )
        turns[-1].append(len(requests))
        requests.append(begin)
        for _ in range(flags.turns - 1):
            turn = TraceRequest(
                source.uniform(0.2, 1.8) * flags.think_s,
                ((next(segments), max(growth - flags.answer, 1)),),
                flags.answer,
                client=agent + 1,
                follows=turns[-1][-1],
            )
            turns[-1].append(len(requests))
            requests.append(turn)
    at, end_s = 0.0, flags.turns * flags.think_s * 1.2
    while at < end_s:
        num_tokens = source.randint(flags.load_prompt // 2, flags.load_prompt * 3 // 2)
        requests.append(TraceRequest(at, ((next(segments), num_tokens),), flags.answer))
        at += source.expovariate(flags.load_rate)
    return AgentLoad(requests, turns)


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
    turns = np.array(load.turns)
    waited = records["first_token"] - records["submitted"]
    others = np.ones(len(load.requests), bool)
    others[turns] = False
    sent, cached = records["prompt_tokens"][turns], records["cached_tokens"][turns]
    quarters = np.array_split(waited[turns], 4, axis=1)
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
        num_known = load.requests[0].segments[0][1] + 1 if number else 1
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
    for name, keep_s in (("without hints", 0.0), ("with hints", ONE_HOUR_S)):
        world = World(config, model, flags.pool_tokens // page_size, seed=flags.seed)
        world.run(arrivals(load, keep_s))
        results[name] = figures(load, world.records, world.replicas[0].info)
        lowest = ideal(load, world.records, page_size)
    num_others = len(load.requests) - flags.agents * flags.turns
    print(
        f"{flags.agents} agents of {flags.turns} turns, prompts of {flags.first_prompt} to"
        f" {flags.last_prompt} tokens; {num_others} other prompts; pool of {flags.pool_tokens}"
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the simulation of a command line, and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    own, server = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    parser = command_parser("bench.agent_cache", __doc__)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=40, help="of each agent")
    parser.add_argument("--shared", type=int, default=1024, help="tokens with which all begin")
    parser.add_argument("--first-prompt", type=int, default=2048, help="tokens of a first turn")
    parser.add_argument("--last-prompt", type=int, default=8000, help="tokens of a last turn")
    parser.add_argument("--answer", type=int, default=48, help="tokens of every answer")
    parser.add_argument("--think-s", type=float, default=120.0, help="mean time between turns")
    parser.add_argument("--load-rate", type=float, default=0.3, help="other requests a second")
    parser.add_argument("--load-prompt", type=int, default=1500, help="mean tokens of them")
    parser.add_argument("--pool-tokens", type=int, default=131_072)
    parser.add_argument("--cost-model", type=Path, default=cost_model.DEFAULT)
    parser.add_argument("--seed", type=int, default=0)

    def run() -> int:
        flags = parser.parse_args(own)
        return simulate(flags, config_of(server))

    return run_command("bench.agent_cache", run)


if __name__ == "__main__":
    sys.exit(main())
