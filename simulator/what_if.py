"""What if: the measured load of a server with other flags, beside what happened.

As a program, which the gateway starts, it reads a WhatIfJob on stdin and writes a WhatIfAnswer to
stdout. It yields to the server and ends with it: lowest CPU priority, bounded CPU time and memory.
Exit codes: 0 done, 2 flags that do not go together, in a line on stderr.
"""

import argparse
import math
import os
import resource
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quadriga.errors import ConfigError, QuadrigaError
from quadriga.server.processes.control_channel import signal_at_parents_death
from quadriga.wire.what_if import (
    FlagVariant,
    MeasuredChoice,
    SpreadMs,
    WhatIfAnswer,
    WhatIfColumn,
    WhatIfJob,
)
from simulator.clock import START
from simulator.cost_model import CostModel
from simulator.flags import config_of, model_of, num_pages_of, source_of, world_arguments
from simulator.latency import Percentiles, Slo, spread
from simulator.records import Records
from simulator.report import Figures, figures
from simulator.trace import TraceRequest
from simulator.world import World

# The requests of a server's JSON log, as a load and as what the server measured.

EVENTS = ("request", "scheduled")  # the scheduler's line of a choice, by ZeroMQ and by HTTP
SHARED_SEGMENT = 0  # the text of all cached prefixes


class LogLine(msgspec.Struct):
    """A line of docs/monitor.md, as far as it is used here."""

    time: str = ""
    process: str = ""
    event: str = ""
    client: str = ""
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float | None = None
    stages_s: dict[str, float] = {}
    priority: int = 0
    retractions: int = 0
    adapter: str = ""


class MeasuredLoad(NamedTuple):
    """What a server measured. Spreads are in ms, as those of a simulation.

    Attributes:
        duration: seconds from the first arrival to the last end.
        throughput: generated tokens per second.
        prefill: from the admission to the first token.
    """

    duration: float
    throughput: float
    queue_wait: Percentiles | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    latency: Percentiles | None
    cached_tokens: int
    retractions: int
    prefill: Percentiles | None = None


def read_server_log(path: Path, last_s: float | None = None) -> list[MeasuredChoice]:
    """Return the requests of a log that generated tokens, by their arrival.

    Args:
        path: what a server with --log-format json and --log-requests wrote.
        last_s: seconds before the last arrival in which the requests arrived.

    Raises:
        ConfigError: the file cannot be read, or has no such request.
    """
    try:
        with path.open("rb") as file:
            choices = [_choice(line) for text in file if (line := _request_line(text)) is not None]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if not choices:
        raise ConfigError(
            f"{path} has no lines of requests: start the server with --log-format json and"
            " --log-requests"
        )
    choices.sort(key=lambda choice: choice.received_at)
    begins_at = 0.0 if last_s is None else choices[-1].received_at - last_s
    return [choice for choice in choices if choice.received_at >= begins_at]


def _request_line(text: bytes) -> LogLine | None:
    """Return a line about a request that generated tokens, else None."""
    if not text.startswith(b"{"):
        return None
    try:
        line = _decode(text)
    except msgspec.DecodeError:
        return None
    is_request = line.process.startswith("scheduler_proc") and line.event in EVENTS
    return line if is_request and line.generated_tokens and line.prompt_tokens else None


_decode = msgspec.json.Decoder(LogLine).decode


def _choice(line: LogLine) -> MeasuredChoice:
    """Return what a line says, with the times of the ends of its stages."""
    ended_at = datetime.fromisoformat(line.time.replace("Z", "+00:00")).timestamp()
    received_at = ended_at - line.seconds
    tokenized_at = received_at + line.stages_s.get("tokenize", 0.0)
    first_token_at = received_at + (line.first_token_s or 0.0)
    return MeasuredChoice(
        received_at=received_at,
        tokenized_at=tokenized_at,
        admitted_at=tokenized_at + line.stages_s.get("queue", 0.0),
        first_token_at=first_token_at,
        last_token_at=first_token_at + line.stages_s.get("decode", 0.0),
        ended_at=ended_at,
        num_prompt_tokens=line.prompt_tokens,
        num_cached_tokens=line.cached_tokens,
        num_generated_tokens=line.generated_tokens,
        priority=line.priority,
        client=line.client,
        num_retractions=line.retractions,
        adapter=line.adapter,
    )


def load_of(choices: list[MeasuredChoice]) -> list[TraceRequest]:
    """Return the load of choices.

    No texts are known: a prompt begins with as many tokens of one common text as were cached, and
    goes on with tokens of its own.
    """
    began_at = choices[0].received_at
    clients: dict[str, int] = {}
    load = []
    for number, choice in enumerate(choices, start=SHARED_SEGMENT + 1):
        num_own = choice.num_prompt_tokens - choice.num_cached_tokens
        parts = ((SHARED_SEGMENT, choice.num_cached_tokens), (number, num_own))
        load.append(
            TraceRequest(
                at=choice.received_at - began_at,
                segments=tuple(part for part in parts if part[1] > 0),
                max_new_tokens=choice.num_generated_tokens,
                client=clients.setdefault(choice.client, len(clients)),
                priority=choice.priority,
                adapter=choice.adapter,
            )
        )
    return load


def measured(choices: list[MeasuredChoice]) -> MeasuredLoad:
    """Return what the server measured."""
    duration = max(choice.ended_at for choice in choices) - choices[0].received_at
    num_tokens = sum(choice.num_generated_tokens for choice in choices)
    return MeasuredLoad(
        duration=duration,
        throughput=num_tokens / duration if duration else 0.0,
        queue_wait=spread(choice.admitted_at - choice.tokenized_at for choice in choices),
        ttft=spread(choice.first_token_at - choice.received_at for choice in choices),
        tpot=spread(
            (choice.last_token_at - choice.first_token_at) / (choice.num_generated_tokens - 1)
            for choice in choices
            if choice.num_generated_tokens > 1
        ),
        latency=spread(choice.ended_at - choice.received_at for choice in choices),
        cached_tokens=sum(choice.num_cached_tokens for choice in choices),
        retractions=sum(choice.num_retractions for choice in choices),
        prefill=spread(choice.first_token_at - choice.admitted_at for choice in choices),
    )


# Simulate what a server has measured: a load, the flags, and steps as long as they were.

Floats = npt.NDArray[np.float64]

AS_IT_WAS = "as it was"
MAX_FITS, FIT_TOLERANCE = 8, 0.03
MAX_ROUNDS = 4  # of both fits
PROMPT_WORK = ("extends", "tokens_beyond", "extend_pairs")  # features that prompts have most of
# A simulation that does not repeat what happened says nothing about other flags.
MIN_REQUESTS, MAX_DEVIATION = 20, 0.10


class RequestTimes(NamedTuple):
    """Seconds since the first arrival, by request: when it was queued and admitted, and its end."""

    queued: Floats
    admitted: Floats
    ended: Floats

    @property
    def duration(self) -> float:
        """Seconds until the last end."""
        return float(self.ended.max(initial=0.0))

    def in_flight(self, at: Floats) -> tuple[list[int], list[int]]:
        """Return how many requests wait, and how many run, at each of these times."""
        passed = [np.searchsorted(np.sort(times), at, side="right") for times in self]
        queued, admitted, ended = passed
        return (queued - admitted).tolist(), (admitted - ended).tolist()


class ReplayedLoad(NamedTuple):
    """A simulated run of a load."""

    figures: Figures
    times: RequestTimes


def replay(
    arguments: argparse.Namespace, load: list[TraceRequest], slowdown: float, model: CostModel
) -> ReplayedLoad:
    """Run a load with these flags, and steps that are longer than the model's by a factor."""
    config = config_of(arguments)
    model = msgspec.structs.replace(model, slowdown=model.slowdown * slowdown)
    world = World(
        config,
        model,
        num_pages_of(arguments, config, model),
        arguments.replicas,
        arguments.load_balance_method,
        prefill_replicas=arguments.prefill_replicas,
        copy_share=arguments.copy_share,
    )
    began = time.perf_counter()
    world.run(enumerate(load))
    run = figures(world, model.delays_ms.delivery, Slo(), time.perf_counter() - began)
    return ReplayedLoad(run, _times(world.records))


def _times(records: Records) -> RequestTimes:
    """Return the times of the requests that were not refused."""
    done = records["admitted"] > 0
    times = (records[name][done] - START for name in ("tokenized", "admitted", "finished"))
    return RequestTimes(*times)


def measured_times(choices: list[MeasuredChoice]) -> RequestTimes:
    """Return the times of choices, which have all been admitted."""
    rows = [(c.tokenized_at, c.admitted_at, max(c.admitted_at, c.ended_at)) for c in choices]
    return RequestTimes(*(np.array(rows).T - choices[0].received_at))


def fit_slowdown(
    arguments: argparse.Namespace,
    load: list[TraceRequest],
    happened: MeasuredLoad,
    model: CostModel,
) -> float:
    """Return the factor of the steps with which the median time per token is the measured one."""
    slowdown, low, high = 1.0, 0.0, math.inf
    tried: list[tuple[float, float]] = []
    for _ in range(MAX_FITS):
        tpot = replay(arguments, load, slowdown, model).figures.tpot
        if happened.tpot is None or tpot is None or not tpot.p50:
            return slowdown  # requests of one token say nothing about it
        ratio = happened.tpot.p50 / tpot.p50
        tried.append((abs(math.log(ratio)), slowdown))
        if abs(ratio - 1) < FIT_TOLERANCE:
            break
        low, high = (slowdown, high) if ratio > 1 else (low, slowdown)
        slowdown *= ratio
        if not low < slowdown < high:  # near its limit a server slows down more than its steps
            slowdown = math.sqrt(low * high)
    return min(tried)[1]


def fit_model(
    arguments: argparse.Namespace,
    load: list[TraceRequest],
    happened: MeasuredLoad,
    model: CostModel,
) -> CostModel:
    """Return a model with the measured medians of a token, and of a prompt once it is admitted.

    The steps are stretched as a whole, and the work that prompts have most of once more: another
    model, type of weights or number of cores changes the price of a prompt and that of a token
    differently.
    """
    slowdown = fit_slowdown(arguments, load, happened, model)
    model = msgspec.structs.replace(model, slowdown=model.slowdown * slowdown)
    for _ in range(MAX_ROUNDS):
        was, now = happened.prefill, replay(arguments, load, 1.0, model).figures.prefill
        if was is None or now is None or not was.p50 or not now.p50:
            break
        ratio = was.p50 / now.p50
        if abs(ratio - 1) < FIT_TOLERANCE:
            break
        ms = {name: ms * ratio if name in PROMPT_WORK else ms for name, ms in model.ms.items()}
        model = msgspec.structs.replace(model, ms=ms)
        slowdown = fit_slowdown(arguments, load, happened, model)
        model = msgspec.structs.replace(model, slowdown=model.slowdown * slowdown)
    return model


def doubt(num_requests: int, happened: MeasuredLoad, simulated: Figures) -> str:
    """Return why a simulation cannot tell what other flags would do; "" where it can.

    Args:
        num_requests: that were measured.
        happened: what was measured.
        simulated: the same load with the same flags.
    """
    if num_requests < MIN_REQUESTS:
        return f"{num_requests} requests were measured, and it takes {MIN_REQUESTS} at least"
    for name, title in (("ttft", "time to first token"), ("tpot", "time per token"),
                        ("latency", "latency")):  # fmt: skip
        was, now = getattr(happened, name), getattr(simulated, name)
        if was is None or now is None or not was.p95:
            continue
        if abs(now.p95 / was.p95 - 1) > MAX_DEVIATION:
            return (
                f"with the server's own flags the p95 {title} is {now.p95:,.1f} ms in the"
                f" simulation, and was {was.p95:,.1f} ms, more than {MAX_DEVIATION:.0%} off: other"
                " work on the machine or a restart was in these minutes, or its steps are unlike"
                " the cost model's"
            )
    return ""


# The simulation that a running server starts: a WhatIfJob on stdin, a WhatIfAnswer on stdout.
#
# It yields to the server and ends with it: lowest CPU priority, bounded CPU time and memory. Exit
# codes: 0 done, 2 flags that do not go together, in a line on stderr.

EXIT_USAGE = 2
LOWEST_PRIORITY = 19
MAX_CPU_S = 120
MAX_MEMORY_BYTES = 4 << 30  # address space, of which libraries take the larger part
NUM_SAMPLES = 160  # of the requests that wait and run
MAX_FIT_TOKENS = 10_000  # generated by the requests to which the length of the steps is fitted


def main() -> int:
    """Answer the job on stdin."""
    signal_at_parents_death(signal.SIGKILL)
    os.nice(LOWEST_PRIORITY)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=WhatIfJob)
    try:
        sys.stdout.buffer.write(msgspec.json.encode(answer(job)))
    except QuadrigaError as error:
        print(f"what if: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


def answer(job: WhatIfJob) -> WhatIfAnswer:
    """Return the figures of all columns. Raise ConfigError for flags that do not go together."""
    as_it_was = world_arguments(job.flags)
    model = model_of(as_it_was, context_length=job.context_length, device=job.device)
    load, happened = load_of(job.choices), measured(job.choices)
    first = _first(job.choices)
    model = fit_model(as_it_was, load_of(first), measured(first), model)
    variants = [FlagVariant(AS_IT_WAS, job.flags), *job.variants]
    runs = [replay(world_arguments(one.flags), load, 1.0, model) for one in variants]
    times = measured_times(job.choices)
    duration_s = max([times.duration, *(run.times.duration for run in runs)])
    at = np.linspace(0.0, duration_s, NUM_SAMPLES)
    columns = [_column("measured", happened, times, at)]
    for variant, run in zip(variants, runs, strict=True):
        columns.append(_column(variant.name, run.figures, run.times, at))
    return WhatIfAnswer(
        num_requests=len(job.choices),
        duration_s=happened.duration,
        interval_s=duration_s / (NUM_SAMPLES - 1),
        cost_model=source_of(as_it_was.cost_model, model),
        slowdown=model.slowdown,
        columns=columns,
        doubt=doubt(len(job.choices), happened, runs[0].figures),
    )


def _first(choices: list[MeasuredChoice]) -> list[MeasuredChoice]:
    """Return the first choices, as many as a simulation of a few seconds has."""
    num_tokens = np.cumsum([choice.num_generated_tokens for choice in choices])
    return choices[: max(1, int(np.searchsorted(num_tokens, MAX_FIT_TOKENS)))]


def _column(
    name: str, run: MeasuredLoad | Figures, times: RequestTimes, at: Floats
) -> WhatIfColumn:
    waiting, running = times.in_flight(at)
    is_simulated = isinstance(run, Figures)
    return WhatIfColumn(
        name=name,
        queue_wait=_spread(run.queue_wait),
        ttft=_spread(run.ttft),
        tpot=_spread(run.tpot),
        latency=_spread(run.latency),
        throughput=run.throughput,
        cached_tokens=run.cached_tokens,
        retractions=run.retractions if is_simulated else None,
        failed=run.errors if isinstance(run, Figures) else {},
        waiting=waiting,
        running=running,
    )


def _spread(spread: Percentiles | None) -> SpreadMs | None:
    return None if spread is None else SpreadMs(spread.p50, spread.p95, spread.p99)


if __name__ == "__main__":
    sys.exit(main())
