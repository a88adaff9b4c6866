"""Measure the scheduler's own time per step: `python -m bench.scheduler_speed`.

The real scheduler runs with a worker that answers at once. 256 requests run and 10,000 wait;
finished requests are replaced outside the timed part. The timed part is everything between a
worker's result and the next plan: decoding the result, recording its tokens, planning, and encoding
plan and output.
"""

import gc
import random
import time
from array import array
from collections import deque

import msgspec

from bench.cli.command import command_parser
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.engine_args import BATCH_MODES, POLICIES, SchedulerArgs
from quadriga.wire import live, packing, sockets, to_scheduler
from quadriga.wire.worker import StepPlan, StepResult, WorkerReady
from scheduler_proc.journal.writer import NoJournal
from scheduler_proc.scheduler import Scheduler
from simulator import latency, replica

PAGE_SIZE = 16
VOCABULARY = 30_000
NUM_PREFIXES = 32
NUM_CLIENTS = 16
decode = msgspec.msgpack.Decoder(StepPlan | StepResult).decode


class Sink:
    """Encodes messages as a socket would, and keeps the frames."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def send(self, message: msgspec.Struct) -> None:
        """Encode a message."""
        self.frames.append(sockets.encode(message))


class SpeedCase:
    """An endless load.

    Prompts have 64 to 512 tokens, half of them with one of 32 prefixes of 256 tokens; outputs have
    32 to 512 tokens.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(256) for _ in range(NUM_PREFIXES)]
        self._count = 0

    def _tokens(self, count: int) -> "array[int]":
        return array("i", self._random.choices(range(3, VOCABULARY), k=count))

    def next(self, now: float) -> to_scheduler.Submit:
        """Return the next request."""
        chosen = self._random
        prompt = self._tokens(chosen.randint(64, 512))
        if chosen.random() < 0.5:
            prompt = chosen.choice(self._prefixes) + prompt[:64]
        self._count += 1
        params = SamplingParams(
            max_new_tokens=chosen.randint(32, 512), seed=0, ignore_eos=True, temperature=0
        )
        client = b"%d" % (self._count % NUM_CLIENTS)
        return to_scheduler.Submit(
            client, f"r{self._count}", packing.pack_ids(prompt), params, True, now, now,
            priority=chosen.randint(-5, 5),
        )  # fmt: skip


def measure(
    args: SchedulerArgs,
    steps: int,
    waiting: int,
    pages: int,
    window: int = 0,
    is_watched: bool = False,
) -> list[float]:
    """Return the seconds of each step.

    Args:
        args: the policy and the limits.
        steps: number of steps.
        waiting: number of requests that wait all the time.
        pages: size of the KV pool.
        window: of every layer, in tokens; 0: none.
        is_watched: the live feed is made.
    """
    worker, now, load = Sink(), 1000.0, SpeedCase(0)
    scheduler = Scheduler(args, frozenset({2}), worker, Sink(), lambda: now, NoJournal())
    slots = args.max_running_requests
    scheduler.step([], [WorkerReady(pages, PAGE_SIZE, slots, "", "cpu", window=window)])
    scheduler.step([load.next(now) for _ in range(waiting + args.max_running_requests)], [])
    simulated = replica.SimulatedSlots(slots, VOCABULARY)
    times: list[float] = []
    while len(times) < steps:
        plan = decode(worker.frames.popleft())
        assert isinstance(plan, StepPlan)
        tokens = simulated.apply(plan).token_ids
        now += 0.01
        frame = sockets.encode(StepResult(plan.step, tokens, now - 0.01, now))
        began = time.perf_counter()
        result = decode(frame)
        assert isinstance(result, StepResult)
        scheduler.step([], [result])
        times.append(time.perf_counter() - began)
        missing = waiting - scheduler.num_queued
        watch = [to_scheduler.WatchSteps(live.MAX_WATCH_S)] if is_watched else []
        scheduler.step([*watch, *(load.next(now) for _ in range(missing))], [])
    return times


def main() -> None:
    """Measure the policies of the command line and print a table."""
    parser = command_parser("bench.scheduler_speed", __doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=POLICIES)
    parser.add_argument("--batch-mode", default="mixed", choices=BATCH_MODES)
    parser.add_argument("--pages", type=int, default=16_384, help="of 16 tokens")
    parser.add_argument("--window", type=int, default=0, help="of every layer, in tokens")
    parser.add_argument("--fair-clients", action="store_true")
    parser.add_argument("--watched", action="store_true", help="a client watches the live feed")
    arguments = parser.parse_args()
    gc.disable()  # as in scheduler_proc/main.py
    print(f"{arguments.running} running, {arguments.waiting} waiting, us a step")
    print(f"{'policy':12}{'p50':>8}{'p90':>8}{'p99':>8}{'p99.9':>8}{'max':>8}")
    for policy in arguments.policies:
        args = SchedulerArgs(
            max_batch_size=arguments.running,
            max_running_requests=arguments.running,
            max_queued_requests=10 * arguments.waiting,
            schedule_policy=policy,
            batch_mode=arguments.batch_mode,
            fair_clients=arguments.fair_clients,
            plan_at_once=True,
        )
        times = measure(
            args,
            arguments.steps,
            arguments.waiting,
            arguments.pages,
            arguments.window,
            arguments.watched,
        )
        times = times[arguments.steps // 4 :]  # the running batch has filled up by then
        shares = [latency.percentile(times, share) for share in (50, 90, 99, 99.9, 100)]
        print(f"{policy:12}" + "".join(f"{1e6 * value:8.0f}" for value in shares))


if __name__ == "__main__":
    main()
