"""Logs of what the scheduler decides, to prove that a change of its code changes no decision.

python -m tests.unit.decisions --write                     rewrite golden/decisions.json
python -m tests.unit.decisions --log steady/lpm/mixed      print the log of a case, to compare two
                                                           versions with diff
python -m tests.unit.decisions --log chaos                 the same of the random servers, or of
                                                           those with --fair-clients (chaos-fair)
python -m tests.unit.decisions --chaos-steps 200000 --seed 0 [--fair-clients]
                                                           print the hash of a longer log
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import SchedulerArgs
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.scheduler import Scheduler
from tests.unit.chaos import random_args, random_life
from tests.unit.decision_log import DecisionLog
from tests.unit.decision_traces import PAGE_SIZE, TRACES
from tests.unit.recorded_server import EOS, Server

GOLDEN = Path(__file__).parent / "golden" / "decisions.json"
# Steps of random servers, and whether these have --fair-clients.
CHAOS = {"chaos": (14_000, False), "chaos-fair": (6_000, True)}
CHAOS_SEED = 0
STEPS_OF_A_SERVER = 100
PREFILL_TOKENS = 64  # prompt tokens of one step that keep the simulated worker busy

POLICIES = ("fcfs", "lpm", "dfs-weight", "pack", "priority", "shortest")
MODES: dict[str, dict[str, Any]] = {
    "prefill-first": {"batch_mode": "prefill-first"},
    "mixed": {"batch_mode": "mixed"},
    "decode-first": {"batch_mode": "decode-first"},
    "alternate": {"batch_mode": "alternate"},
    "static": {"batching": "static"},
}
EXTRAS: dict[str, dict[str, Any]] = {
    "fair": {"fair_clients": True},
    "no-cache": {"disable_radix_cache": True},
    "at-once": {"plan_at_once": True},
}
SPECIAL: dict[str, dict[str, Any]] = {
    "whole-prompts": {"chunked_prefill_size": -1},
    "chunks-of-16": {"chunked_prefill_size": 16, "batch_mode": "decode-first"},
    "one-prompt": {"prefill_max_batch_size": 1},
    "careful": {"schedule_conservativeness": 5.0},
    "bold": {"schedule_conservativeness": 0.01},
    "short-queue": {"max_queued_requests": 2},
    "few-of-a-client": {"max_requests_per_client": 3},
    "small-window": {"schedule_policy": "pack", "pack_lookahead": 3, "pack_fifo_every": 2},
    "preempting": {"schedule_policy": "priority", "priority_preemption_threshold": 1},
    "all": {
        "schedule_policy": "priority",
        "batch_mode": "alternate",
        "fair_clients": True,
        "plan_at_once": True,
    },
}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the trace and the flags of every case, by name: trace/policy/mode or trace/special."""
    results: dict[str, tuple[str, dict[str, Any]]] = {}
    for trace in TRACES:
        for name, flags in _combinations():
            try:
                SchedulerArgs(**flags).validate()
            except ConfigError:
                continue
            results[f"{trace}/{name}"] = (trace, flags)
    return results


def _combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    for policy in POLICIES:
        for mode, flags in MODES.items():
            yield f"{policy}/{mode}", {"schedule_policy": policy, **flags}
        for extra, more in EXTRAS.items():
            yield f"{policy}/mixed/{extra}", {"schedule_policy": policy, **more}
    for mode, flags in MODES.items():
        for extra, more in EXTRAS.items():
            yield f"fcfs/{mode}/{extra}", {**flags, **more}
    yield from SPECIAL.items()


def run_case(trace_name: str, flags: dict[str, Any], log: DecisionLog) -> None:
    """Run a trace under the flags of a case, and log what the scheduler sends."""
    trace = TRACES[trace_name]()
    args = SchedulerArgs(**{**trace.flags, **flags})
    server = Server(log)
    server.scheduler = Scheduler(
        args, frozenset({EOS}), server.worker, server.detok, server.clock, NoJournal()
    )
    server.stops = trace.stops
    slots = args.max_running_requests
    ready = ["ready", trace.num_pages, PAGE_SIZE, slots, "float32", "cpu", 0, "", PREFILL_TOKENS]
    server.report(0, ready)
    for at_us, message in trace.messages:
        server.send(at_us + 1, message)
    server.run()


def run_chaos(num_steps: int, seed: int, fair_clients: bool, log: DecisionLog) -> None:
    """Run random servers under random loads until there were so many steps.

    Args:
        num_steps: minimum number of steps.
        seed: of the first server.
        fair_clients: run only servers that draw --fair-clients; else only those that do not.
        log: of what the schedulers send.
    """
    while log.num_plans < num_steps:
        if random_args(random.Random(seed)).fair_clients == fair_clients:
            random_life(
                random.Random(seed), STEPS_OF_A_SERVER, lambda _link, message: log.observe(message)
            )
        seed += 1


def run(name: str, log: DecisionLog) -> None:
    """Run the case of a name.

    Raises:
        KeyError: there is no such case.
    """
    if name in CHAOS:
        num_steps, fair_clients = CHAOS[name]
        run_chaos(num_steps, CHAOS_SEED, fair_clients, log)
    else:
        run_case(*cases()[name], log)


def summaries(names: list[str]) -> dict[str, dict[str, Any]]:
    """Run cases and return the summary of each log."""
    results = {}
    for name in names:
        log = DecisionLog()
        run(name, log)
        results[name] = log.summary
    return results


def expected() -> dict[str, dict[str, Any]]:
    """Return the committed summaries."""
    document: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text())
    return document


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="rewrite the committed file")
    parser.add_argument("--log", metavar="CASE", help="print the log of a case")
    parser.add_argument("--chaos-steps", type=int, metavar="N", help="log random servers")
    parser.add_argument("--seed", type=int, default=CHAOS_SEED, help="of the random servers")
    parser.add_argument("--fair-clients", action="store_true", help="of the random servers")
    arguments = parser.parse_args()
    if arguments.log is not None:
        names = [*CHAOS, *cases()]
        if arguments.log not in names:
            sys.exit(f"no case {arguments.log!r}; there are {', '.join(names)}")
        run(arguments.log, DecisionLog(print))
    elif arguments.chaos_steps is not None:
        log = DecisionLog()
        run_chaos(arguments.chaos_steps, arguments.seed, arguments.fair_clients, log)
        print(json.dumps(log.summary))
    elif arguments.write:
        lines = [
            f"  {json.dumps(name)}: {json.dumps(summary)}"
            for name, summary in summaries([*cases(), *CHAOS]).items()
        ]
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        parser.error("give --write, --log or --chaos-steps")


if __name__ == "__main__":
    main()
