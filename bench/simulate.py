"""The real scheduler on a simulated clock and worker: `python -m bench.simulate --num-requests N`.

A million requests in minutes, on one replica or many, to see what a flag of the scheduler does. A
step takes the time that a cost model gives it (bench/cost_model.py); nothing but the scheduler is
run. Exit codes: 0 all requests finished, 1 some failed, 2 bad flags.
"""

import argparse
import dataclasses
import gc
import json
import math
import statistics
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from bench import cost_model, trace
from bench.cost_model import CostModel, features_of
from bench.flags import server_flags_in
from bench.load_flags import LOAD_DEFAULTS, LOAD_FLAGS, add_load_flags, trace_spec
from bench.metrics import MS, Goodput, Slo, Spread
from bench.trace import FIRST_ID, TraceRequest
from quadriga import config as server_flags
from quadriga.config import SchedulerArgs, ServerConfig
from quadriga.errors import ConfigError, PromptTooLong, QuadrigaError
from quadriga.messages import (
    CloseText,
    SchedulerMessage,
    StepOutput,
    StepPlan,
    StepResult,
    Submit,
    WorkerReady,
    pack_ids,
)
from quadriga.sampling import SamplingParams
from scheduler_proc.main import MESSAGES_A_ROUND, QUIETS_GATHERED
from scheduler_proc.scheduler import Scheduler

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

START = 1000.0
"""Simulated seconds at which a run begins: a time of 0.0 means never."""
MOST_SAMPLES = 1024
"""Of pages and queues over time; the interval between them grows with the run."""
SAMPLED = ("running", "waiting", "pages_held", "pages_cached")
"""What the scheduler tells of itself, as in Sample."""


# --- the worker -----------------------------------------------------------------------------------


def draw_ids(seeds: Ints, positions: Ints, vocab_size: int) -> Ints:
    """The token that the simulated model gives at a position: its own ones for each seed."""
    mixed = (seeds * 1_000_003 + positions) * 2_654_435_761 & 0x7FFF_FFFF_FFFF
    return FIRST_ID + (mixed >> 13) % (vocab_size - FIRST_ID)


class Clock:
    """Simulated Unix seconds."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class SimulatedWorker:
    """Answers a plan at once with the result that will be there later: `deliver` is given the time
    at which the scheduler has it, and the result.

    Of each slot it keeps how many tokens are known and computed, no KV.
    """

    def __init__(
        self,
        model: CostModel,
        num_slots: int,
        clock: Clock,
        deliver: Callable[[float, StepResult], None],
    ) -> None:
        self._prices = model.prices
        self._plan_delay = model.delays_ms.plan / MS
        self._gap = model.delays_ms.gap / MS
        self._result_delay = model.delays_ms.result / MS
        self._vocab_size = model.measured_on.vocab_size
        self._clock = clock
        self._deliver = deliver
        self._known = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.int64)
        self._free_at = 0.0
        self.steps = 0
        self.rows = 0
        self.busy = 0.0

    def send(self, message: msgspec.Struct) -> None:
        if not isinstance(message, StepPlan):
            return
        for new in message.new:
            self._known[new.slot] = len(new.token_ids) // 4
            self._computed[new.slot] = new.computed
            self._seeds[new.slot] = new.seed
        slots = np.frombuffer(message.slots, "<i4")
        num_tokens = np.frombuffer(message.num_tokens, "<i4").astype(np.int64)
        began = max(self._clock.now + self._plan_delay, self._free_at + self._gap)
        token_ids, seconds = self._run(slots, num_tokens)
        self._free_at = ended = began + seconds
        self.steps += 1
        self.rows += len(slots)
        self.busy += seconds
        self._deliver(ended + self._result_delay, StepResult(message.step, token_ids, began, ended))

    def _run(self, slots: npt.NDArray[np.int32], num_tokens: Ints) -> tuple[bytes, float]:
        before, known = self._computed[slots], self._known[slots]
        after = before + num_tokens
        samples = after == known
        assert (after <= known).all(), "a token is computed that nobody knows"
        self._computed[slots] = after
        self._known[slots] = known + samples
        tokens = np.where(samples, draw_ids(self._seeds[slots], known, self._vocab_size), -1)
        features = features_of(num_tokens, before, int(samples.sum()))
        prices = zip(self._prices, msgspec.structs.astuple(features), strict=True)
        return tokens.astype("<i4").tobytes(), sum(price * amount for price, amount in prices)


# --- what is recorded -----------------------------------------------------------------------------


class Growing:
    """A numpy array that grows by doubling."""

    def __init__(self, dtype: type, size: int = 1024) -> None:
        self._values: npt.NDArray[Any] = np.zeros(size, dtype)
        self.length = 0

    def extend(self, values: npt.NDArray[Any]) -> None:
        self.reserve(self.length + len(values))
        self._values[self.length : self.length + len(values)] = values
        self.length += len(values)

    def reserve(self, length: int) -> None:
        """Room for so many values; new ones are 0."""
        if length > len(self._values):
            size = max(length, 2 * len(self._values))
            self._values = np.concatenate(
                [self._values, np.zeros(size - len(self._values), self._values.dtype)]
            )

    @property
    def room(self) -> npt.NDArray[Any]:
        return self._values

    @property
    def values(self) -> npt.NDArray[Any]:
        return self._values[: self.length]


class Records:
    """What was seen of every request, by its index in the trace. Times are simulated seconds."""

    TIMES = ("submitted", "tokenized", "admitted", "first_token", "last_token", "finished")
    TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens")

    def __init__(self) -> None:
        self.length = 0
        self._columns = {name: Growing(np.float64) for name in self.TIMES}
        self._columns |= {name: Growing(np.int32) for name in self.TOKENS}
        self.gaps = Growing(np.float32)
        self.errors: dict[int, str] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """A column, one value a request."""
        return self._columns[name].room[: self.length]

    def add(self, index: int, submitted: float, tokenized: float) -> None:
        self.length = max(self.length, index + 1)
        for column in self._columns.values():
            column.reserve(self.length)
        self["submitted"][index] = submitted
        self["tokenized"][index] = tokenized

    def take_tokens(self, indexes: Ints, when: float) -> None:
        """Each of these requests gave one token."""
        last = self["last_token"]
        before = last[indexes]
        self.gaps.extend((when - before)[before > 0])
        last[indexes] = when
        self["completion_tokens"][indexes] += 1

    def end(self, index: int, closed: CloseText, delivered: float) -> None:
        self["finished"][index] = delivered
        self["admitted"][index] = closed.admitted
        self["first_token"][index] = closed.first_token
        self["prompt_tokens"][index] = closed.prompt_tokens
        self["cached_tokens"][index] = closed.cached_tokens
        if closed.error is not None:
            self.errors[index] = closed.error.code

    def fail(self, index: int, code: str, when: float) -> None:
        """The request never came to a scheduler."""
        self["finished"][index] = when
        self.errors[index] = code


@dataclass(frozen=True, slots=True)
class Sample:
    """All replicas together at one moment. Pages: held by requests, and cached for reuse."""

    time: float
    running: int
    waiting: int
    pages_held: int
    pages_cached: int


# --- a replica ------------------------------------------------------------------------------------


class Replica:
    """A scheduler with its worker, and what the process around the scheduler does."""

    def __init__(
        self, number: int, config: ServerConfig, model: CostModel, num_pages: int, world: "World"
    ) -> None:
        self.number = number
        self.num_pages = num_pages
        self.load = 0
        self._world = world
        self._clock = world.clock
        self._messages: list[SchedulerMessage] = []
        self._results: list[StepResult] = []
        self._index_of = Growing(np.int64)
        self._wake_at = math.inf
        self._gathered_at: float | None = None
        self._gather_deadline = 0.0
        slots = config.scheduler.max_running_requests
        self.worker = SimulatedWorker(
            model, slots, self._clock, lambda when, result: world.at(when, self.take_result, result)
        )
        self.scheduler = Scheduler(
            config.scheduler, frozenset(), self.worker, detok=self, clock=self._clock
        )
        on, page_size = model.measured_on, config.worker.page_size
        self.scheduler.iterate([], [WorkerReady(num_pages, page_size, slots, on.dtype, on.device)])

    def take_message(self, message: SchedulerMessage) -> None:
        self._messages.append(message)
        self._world.touch(self)

    def take_result(self, result: StepResult) -> None:
        self._results.append(result)
        self._world.touch(self)

    def round(self) -> None:
        """What the process does when it is woken."""
        if self._gathers():
            return
        messages, self._messages = self._messages, []
        results, self._results = self._results, []
        self.scheduler.iterate(messages[:MESSAGES_A_ROUND], results)
        for first in range(MESSAGES_A_ROUND, len(messages), MESSAGES_A_ROUND):
            self.scheduler.iterate(messages[first : first + MESSAGES_A_ROUND], [])
        self._wake(self.scheduler.wake_at)

    def _gathers(self) -> bool:
        """While the worker has nothing to do, requests that come together are waited for."""
        now, quiet = self._clock.now, self.scheduler.patience
        if self._gathered_at is None:
            if not (self._messages and self.scheduler.idle and quiet > 0):
                return False
            self._gather_deadline = now + QUIETS_GATHERED * quiet
        elif now >= min(self._gathered_at, self._gather_deadline):
            self._gathered_at = None
            return False
        self._gathered_at = now + quiet
        self._wake(self._gathered_at)
        return True

    def _wake(self, when: float | None) -> None:
        """The next round without a message; an earlier wish is forgotten."""
        before, self._wake_at = self._wake_at, math.inf if when is None else when
        if self._wake_at not in (before, math.inf):
            self._world.at(max(self._wake_at, self._clock.now), self._is_woken, self._wake_at)

    def _is_woken(self, wish: float) -> None:
        if wish == self._wake_at:
            self._wake_at = math.inf
            self._world.touch(self)

    def send(self, message: msgspec.Struct) -> None:
        """What the scheduler has for the detokenizer."""
        if not isinstance(message, StepOutput):
            return
        for opened in message.opened:
            self._index_of.reserve(opened.seq + 1)
            self._index_of.room[opened.seq] = int(opened.request_id)
        if message.seqs:
            self._world.records.take_tokens(self._index_of.room[message.seqs], message.time)
        for closed in message.closed:
            self.load -= 1
            self._world.close(closed, message.time)

    @property
    def info(self) -> dict[str, Any]:
        """Gauges and counters of the scheduler."""
        return dict(self.scheduler.info())


# --- the event loop -------------------------------------------------------------------------------


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way. head: the tokens that it continues."""

    index: int
    request: TraceRequest
    head: "array[int]"


class World:
    """Clients, replicas and one heap of what happens when.

    seed: of the prompts. least_loaded: a request goes to the replica with the fewest open ones;
    else to each in turn. on_end is called once for each request that has ended.
    """

    def __init__(
        self,
        config: ServerConfig,
        model: CostModel,
        num_pages: int,
        replicas: int = 1,
        least_loaded: bool = False,
        seed: int = 0,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self.clock = Clock()
        self.records = Records()
        self.samples: list[Sample] = []
        self._sample_seconds = 0.01
        self._next_sample = 0.0
        self._front_door = FrontDoor(config, model)
        self._message_delay = model.delays_ms.message_in / MS
        self._delivery_delay = model.delays_ms.delivery / MS
        self._seed = seed
        self._on_end = on_end
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._touched: dict[Replica, None] = {}
        self._arrivals: Iterator[tuple[int, TraceRequest]] = iter(())
        self._followers: dict[int, list[Sent]] = {}
        self._continued: dict[int, array[int]] = {}
        self.replicas = [Replica(n, config, model, num_pages, self) for n in range(replicas)]
        self._turns = None if least_loaded else cycle(self.replicas)

    def run(self, arrivals: Iterable[tuple[int, TraceRequest]]) -> None:
        """Until every request has ended. arrivals: with their indexes; sorted by time, but one that
        follows another stands before any that comes at a time later than that one's."""
        self._arrivals = iter(arrivals)
        self._next_arrival()
        heap, clock, touched = self._heap, self.clock, self._touched
        while heap:
            now = clock.now = heap[0][0]
            while heap and heap[0][0] == now:
                _, _, act, subject = heappop(heap)
                act(subject)
            for replica in list(touched):
                replica.round()
            touched.clear()
            if now >= self._next_sample:
                self._sample()

    def at(self, when: float, act: Callable[[Any], None], subject: Any) -> None:
        heappush(self._heap, (when, next(self._order), act, subject))

    def touch(self, replica: Replica) -> None:
        """The replica has a round once all that happens at this moment has happened."""
        self._touched[replica] = None

    def close(self, closed: CloseText, when: float) -> None:
        """The terminal message of a request."""
        index, delivered = int(closed.request_id), when + self._delivery_delay
        self.records.end(index, closed, delivered)
        self._ended(index, delivered)

    # --- clients ---

    def _next_arrival(self) -> None:
        for index, request in self._arrivals:
            sent = Sent(index, request, array("i"))
            if request.follows is None:
                self.at(START + request.at, self._arrive, sent)
                return
            self._followers.setdefault(request.follows, []).append(sent)

    def _arrive(self, sent: Sent) -> None:
        self._next_arrival()
        self._submit(sent)

    def _submit(self, sent: Sent) -> None:
        index, request = sent.index, sent.request
        ids = sent.head + trace.prompt_ids(request, self._front_door.vocab_size, self._seed)
        now = self.clock.now
        self.records.add(index, now, now + self._message_delay)
        try:
            message = self._front_door.submit(index, request, ids, now, now + self._message_delay)
        except QuadrigaError as error:
            self._fail(index, error.code)
            return
        if any(follower.request.continues for follower in self._followers.get(index, ())):
            self._continued[index] = ids
        replica = self._replica()
        replica.load += 1
        self.at(message.tokenized, replica.take_message, message)

    def _replica(self) -> Replica:
        if self._turns is not None:
            return next(self._turns)
        return min(self.replicas, key=lambda replica: replica.load)

    def _fail(self, index: int, code: str) -> None:
        now = self.clock.now
        self.records.fail(index, code, now)
        self._ended(index, now)

    def _ended(self, index: int, delivered: float) -> None:
        """Let those go that wait for this one. A chat of which a turn failed does not go on."""
        self._on_end()
        prompt = self._continued.pop(index, array("i"))
        for sent in self._followers.pop(index, ()):
            if sent.request.continues:
                if index in self.records.errors:
                    self.records.add(sent.index, delivered, delivered)
                    self._fail(sent.index, "not_sent")
                    continue
                generated = int(self.records["completion_tokens"][index])
                first = int(self.records["prompt_tokens"][index])
                positions = np.arange(first, first + generated)
                tokens = draw_ids(np.array([index]), positions, self._front_door.vocab_size)
                sent = Sent(sent.index, sent.request, prompt + array("i", tokens.tolist()))
            self.at(delivered + sent.request.at, self._submit, sent)

    def _sample(self) -> None:
        infos = [replica.info for replica in self.replicas]
        amounts = [sum(info[name] for info in infos) for name in SAMPLED]
        self.samples.append(Sample(self.clock.now, *amounts))
        if len(self.samples) > MOST_SAMPLES:
            del self.samples[1::2]
            self._sample_seconds *= 2
        self._next_sample = self.clock.now + self._sample_seconds


class FrontDoor:
    """What becomes of a request before the scheduler has it."""

    def __init__(self, config: ServerConfig, model: CostModel) -> None:
        own = model.measured_on.context_length
        self._limit = min(config.model.context_length or own, own)
        self._args = config.front_door
        self.vocab_size = model.measured_on.vocab_size

    def submit(
        self, index: int, request: TraceRequest, ids: "array[int]", now: float, tokenized: float
    ) -> Submit:
        """PromptTooLong where the context cannot hold the request."""
        most = request.max_new_tokens
        if self._args.allow_auto_truncate:
            ids = ids[-(self._limit - 1) :]
            most = min(most, self._limit - len(ids))
        if len(ids) + most > self._limit:
            raise PromptTooLong(f"{len(ids)} + {most} tokens are more than {self._limit}")
        queue, whole = self._args.queue_timeout, self._args.request_timeout
        return Submit(
            client=b"%d" % request.client,
            request_id=str(index),
            prompt_ids=pack_ids(ids),
            params=SamplingParams(
                max_new_tokens=most, temperature=0.0, seed=index, ignore_eos=True
            ),
            stream=True,
            received=now,
            tokenized=tokenized,
            priority=request.priority,
            queue_deadline=None if queue is None else now + queue,
            deadline=None if whole is None else now + whole,
        )


# --- what came out --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """One simulated run. Spreads in ms; what bench.metrics.Summary has too means the same there.

    errors: failed requests by their code. duration: simulated seconds from the first submit to the
    last end. busy: share of it in which the workers ran steps. rows: mean of a step.
    pages_held, pages_cached: mean shares of all pages, 0 to 1; pages_peak: the highest seen of
    held ones. wall: seconds that the simulation took.
    """

    requests: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cache_hit_rate: float
    duration: float
    throughput: float
    request_rate: float
    queue_wait: Spread | None
    prefill: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    latency: Spread | None
    goodput: Goodput | None
    steps: int
    rows: float
    busy: float
    retractions: int
    pages_total: int
    pages_held: float
    pages_peak: float
    pages_cached: float
    wall: float


def spread(seconds: npt.NDArray[Any]) -> Spread | None:
    """The spread in ms of durations in seconds; None if there are none."""
    if len(seconds) == 0:
        return None
    ms = np.maximum(seconds, 0.0) * MS
    p50, p95, p99 = (float(value) for value in np.percentile(ms, [50, 95, 99]))
    return Spread(len(ms), float(ms.mean()), p50, p95, p99, float(ms.max()))


def figures(world: World, delivery_ms: float, slo: Slo, wall: float) -> Figures:
    """What the records and the replicas say."""
    records, replicas = world.records, world.replicas
    done = np.ones(records.length, dtype=bool)
    done[list(records.errors)] = False
    column = {name: records[name][done] for name in (*Records.TIMES, *Records.TOKENS)}
    delivery = delivery_ms / MS
    ttft = column["first_token"] + delivery - column["submitted"]
    several = column["completion_tokens"] > 1
    tpot = np.zeros(len(ttft))
    tpot[several] = (column["last_token"] - column["first_token"])[several] / (
        column["completion_tokens"][several] - 1
    )
    duration = float(records["finished"].max() - records["submitted"].min())
    prompt, cached = int(column["prompt_tokens"].sum()), int(column["cached_tokens"].sum())
    completion = int(column["completion_tokens"].sum())
    good = int((_within(ttft, slo.ttft_ms) & _within(tpot, slo.tpot_ms)).sum())
    steps, samples = sum(r.worker.steps for r in replicas), world.samples
    pages = sum(r.num_pages for r in replicas)
    return Figures(
        requests=records.length,
        failed=len(records.errors),
        errors=dict(Counter(records.errors.values())),
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        cache_hit_rate=cached / max(prompt, 1),
        duration=duration,
        throughput=completion / duration if duration else 0.0,
        request_rate=len(ttft) / duration if duration else 0.0,
        queue_wait=spread(column["admitted"] - column["tokenized"]),
        prefill=spread(column["first_token"] - column["admitted"]),
        ttft=spread(ttft),
        tpot=spread(tpot[several]),
        itl=spread(records.gaps.values),
        latency=spread(column["finished"] - column["submitted"]),
        goodput=Goodput(good, good / records.length, good / duration if duration else None)
        if slo
        else None,
        steps=steps,
        rows=sum(r.worker.rows for r in replicas) / max(steps, 1),
        busy=sum(r.worker.busy for r in replicas) / (duration * len(replicas)) if duration else 0.0,
        retractions=sum(r.info["retractions"] for r in replicas),
        pages_total=pages,
        pages_held=statistics.fmean(s.pages_held for s in samples) / pages,
        pages_peak=max(s.pages_held for s in samples) / pages,
        pages_cached=statistics.fmean(s.pages_cached for s in samples) / pages,
        wall=wall,
    )


def _within(seconds: Floats, limit_ms: float | None) -> npt.NDArray[np.bool_]:
    return seconds * MS <= (math.inf if limit_ms is None else limit_ms)


def block(run: Figures, replicas: int, source: str) -> str:
    """The lines of a run, with the names that bench.serving gives them."""
    errors = ", ".join(f"{number} {code}" for code, number in run.errors.items())
    goodput = run.goodput
    return "\n".join(
        [
            "=== simulation ===",
            f"Cost model: {source}",
            f"Replicas: {replicas}",
            f"Requests: {run.requests}",
            f"Prompt tokens (total): {run.prompt_tokens}",
            f"Completion tokens (total): {run.completion_tokens}",
            f"Duration: {run.duration:.2f} s",
            f"Queue wait (post-tok) p50/p95/p99: {_spread(run.queue_wait)}",
            f"Prefill->first token p50/p95/p99: {_spread(run.prefill)}",
            f"TTFT p50/p95/p99: {_spread(run.ttft)}",
            f"TPOT p50/p95/p99: {_spread(run.tpot)}",
            f"ITL p50/p95/p99: {_spread(run.itl)}",
            f"Latency p50/p95/p99: {_spread(run.latency)}",
            f"Throughput (completion,total): {run.throughput:.2f} tokens/s",
            f"Request rate: {run.request_rate:.2f} requests/s",
            "Goodput: n/a (no --slo-ttft-ms, no --slo-tpot-ms)"
            if goodput is None
            else f"Goodput: {goodput.rate or 0:.2f} requests/s ({goodput.share:.1%} of all)",
            f"Prefix cache hits: {run.cached_tokens} tokens ({run.cache_hit_rate:.1%})",
            f"KV pages held mean/peak: {run.pages_held:.1%}/{run.pages_peak:.1%}"
            f" of {run.pages_total}, cached {run.pages_cached:.1%}",
            f"Retractions: {run.retractions}",
            f"Worker busy: {run.busy:.1%} ({run.steps} steps of {run.rows:.1f} rows)",
            f"Failed requests: {run.failed}" + (f" ({errors})" if errors else ""),
            f"Simulated in: {run.wall:.1f} s ({run.requests / max(run.wall, 1e-9):.0f} requests/s,"
            f" {run.steps / max(run.wall, 1e-9):.0f} steps/s)",
        ]
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "n/a"
    return "/".join(f"{value:.2f}" for value in (spread.p50, spread.p95, spread.p99)) + " ms"


COMPARED = ("ttft", "tpot", "itl", "queue_wait", "latency")


def comparison(run: Figures, measured: Sequence[dict[str, Any]]) -> str:
    """Simulated against measured: the medians of the runs of a bench.serving --json."""
    rows = [("throughput, tokens/s", run.throughput, [one["throughput"] for one in measured])]
    for name in COMPARED:
        mine = getattr(run, name)
        for part in ("p50", "p99"):
            theirs = [one[name][part] for one in measured if one.get(name)]
            if mine is not None and theirs:
                rows.append((f"{name} {part}, ms", getattr(mine, part), theirs))
    lines = [f"=== simulated against measured (median of {len(measured)} runs) ==="]
    for title, mine, theirs in rows:
        real = statistics.median(theirs)
        ratio = f"{mine / real:.3f}" if real else "n/a"
        lines.append(f"{title:22} {mine:12.2f} {real:12.2f}   ratio {ratio}")
    return "\n".join(lines)


# --- the command line -----------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate what a command line says; the exit code."""
    try:
        return simulate(_parser().parse_args(argv))
    except QuadrigaError as error:
        print(f"bench.simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench.simulate: interrupted", file=sys.stderr)
        return 130


def simulate(arguments: argparse.Namespace) -> int:
    config, model = _config(arguments), cost_model.load(arguments.cost_model)
    draw_plot = _plotter(arguments.plot)
    measured = None if arguments.compare is None else _measured_runs(arguments.compare)
    number, arrivals = _arrivals(arguments)
    with tqdm(total=number, desc="simulate", unit="req", leave=False, disable=None) as bar:
        world = World(
            config,
            model,
            _num_pages(arguments, config, model),
            arguments.replicas,
            arguments.dispatch == "least-loaded",
            arguments.seed,
            on_end=bar.update,
        )
        began = time.perf_counter()
        gc.freeze()
        world.run(arrivals)
        wall = time.perf_counter() - began
    slo = Slo(arguments.slo_ttft_ms, arguments.slo_tpot_ms)
    run = figures(world, model.delays_ms.delivery, slo, wall)
    print(block(run, arguments.replicas, _source(arguments.cost_model, model)))
    if measured is not None:
        print(comparison(run, measured))
    if arguments.json is not None:
        flags = {name: str(value) for name, value in vars(arguments).items()}
        document = {"flags": flags, "summary": dataclasses.asdict(run)}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    draw_plot(world)
    return 1 if run.failed else 0


def _arrivals(arguments: argparse.Namespace) -> tuple[int, Iterable[tuple[int, TraceRequest]]]:
    """How many requests come, and they with their indexes, in the order that World.run wants."""
    given = vars(arguments)
    drawn = [server_flags.flag_name(name) for name in LOAD_FLAGS if name in given]
    if arguments.trace is not None:
        if drawn:
            raise ConfigError(
                f"{', '.join(drawn)} would change nothing about --trace: leave it out"
            )
        requests = trace.read_trace(arguments.trace)
        indexed = sorted(
            enumerate(requests), key=lambda one: 0.0 if one[1].follows is not None else one[1].at
        )
        return len(requests), indexed
    spec = trace_spec(DEFAULTS | given)
    return spec.num_requests, enumerate(trace.generate(spec))


def _num_pages(arguments: argparse.Namespace, config: ServerConfig, model: CostModel) -> int:
    """--num-pages, else --max-total-tokens, else as much as the measured machine has."""
    if arguments.num_pages is None:
        tokens = config.worker.max_total_tokens or model.measured_on.max_total_tokens
        return tokens // config.worker.page_size
    if config.worker.max_total_tokens is not None:
        raise ConfigError("--num-pages and --max-total-tokens say the same: leave one out")
    if arguments.num_pages <= 0:
        raise ConfigError(f"num_pages must be positive (it is {arguments.num_pages})")
    return int(arguments.num_pages)


def _plotter(path: Path | None) -> Callable[[World], None]:
    """Draws the run into a file, once it is over. ConfigError at once where that cannot work."""
    if path is None:
        return lambda world: None
    try:
        from bench import plots
    except ImportError as error:
        raise ConfigError(
            f"--plot needs {error.name}, which is not installed: pip install matplotlib"
        ) from None
    return lambda world: plots.draw(path, world.records, world.samples, START)


def _measured_runs(path: Path) -> list[dict[str, Any]]:
    try:
        return [run["summary"] for run in json.loads(path.read_text())["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no result of bench.serving --json: {error!r}") from None


def _source(path: Path, model: CostModel) -> str:
    on = model.measured_on
    threads = f", {on.threads} threads" if on.device == "cpu" else ""
    return f"{path.stem} ({on.model}, {on.dtype}, {on.device}{threads}, {on.date})"


DEFAULTS = LOAD_DEFAULTS | {
    "num_requests": 1000,
    "random_input_len": "64",
    "max_new_tokens": "32",
}

SERVER_FLAGS = {
    *(field.name for field in dataclasses.fields(SchedulerArgs)),
    *("context_length", "allow_auto_truncate", "queue_timeout", "request_timeout"),
    *("page_size", "max_total_tokens"),
}
"""Flags of a server that change a simulation."""


def _config(arguments: argparse.Namespace) -> ServerConfig:
    """ConfigError for flags that cannot work, or would change nothing here."""
    idle = [server_flags.flag_name(n) for n in server_flags_in(arguments) if n not in SERVER_FLAGS]
    if idle:
        raise ConfigError(f"{', '.join(idle)} would change nothing in a simulation: leave it out")
    if arguments.replicas <= 0:
        raise ConfigError(f"replicas must be positive (it is {arguments.replicas})")
    return server_flags.from_namespace(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bench.simulate", description=__doc__, allow_abbrev=False
    )
    load = parser.add_argument_group("what is sent, and when")
    load.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests as recorded (format: bench/trace.py)"
    )
    load.add_argument("--seed", type=int, default=0, help="of what is drawn")
    add_load_flags(load, defaults=DEFAULTS)
    _add_world(parser.add_argument_group("what it is sent to"))
    _add_output(parser.add_argument_group("what comes out"))
    server_flags.add_flags(parser)
    return parser


def _add_world(group: Any) -> None:
    add = group.add_argument
    add("--replicas", type=int, default=1, metavar="R", help="servers, each with its scheduler")
    add(
        "--dispatch",
        choices=("round-robin", "least-loaded"),
        default="round-robin",
        help="which replica a request goes to (default: round-robin)",
    )
    add("--num-pages", type=int, metavar="N", help="KV pages of a replica")
    add(
        "--cost-model",
        type=Path,
        default=cost_model.DEFAULT,
        metavar="FILE",
        help=f"how long a step takes (default: {cost_model.DEFAULT.name})",
    )


def _add_output(group: Any) -> None:
    add = group.add_argument
    add("--slo-ttft-ms", type=float, metavar="MS", help="a request counts as good up to this TTFT")
    add("--slo-tpot-ms", type=float, metavar="MS", help="... and this time per output token")
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    add("--plot", type=Path, metavar="FILE.png", help="draw the run")
    add(
        "--compare",
        type=Path,
        metavar="RUN.json",
        help="print this beside a bench.serving --json of the same trace",
    )


if __name__ == "__main__":
    sys.exit(main())
