"""Compare the expected waits of requests with their real ones.

    python -m bench.simulate.expected_wait

Each request is asked about --ask-after seconds after it was sent. What counts are the requests that
are queued then and wait at least one more second: |estimate / wait - 1|, in the median and at p90.
--simulate runs the real scheduler in simulated time, which takes seconds; otherwise a server at
--endpoint gets the same load. There --stop "." ends answers where the scheduler cannot foresee it.
Exit codes: 0 the median is within --limit, 1 it is not, 2 bad flags, 3 no server.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from bench.cli.command import EXIT_FAILED, EXIT_OK, command_parser, run_command, run_until_signal
from bench.load.synthetic import Lengths
from bench.scenarios import LONG_INPUT, LONG_OUTPUT
from quadriga import clock
from quadriga.client.async_client import AsyncClient
from quadriga.client.request_handle import RequestHandle
from quadriga.errors import ConfigError
from quadriga.sampling.params import SamplingParams
from quadriga.server.config.server_config import ServerConfig
from quadriga.wire.client import MAX_PROGRESS_IDS, RequestState
from simulator import cost_model
from simulator.trace import TraceRequest, prompt_ids
from simulator.world import World

MIN_WAIT_S = 1.0
ASK_INTERVAL_S = 0.25
PAGES = 4096


class WaitSample(NamedTuple):
    """An expected wait, None where there was no estimate, and the real one, in seconds."""

    expected_s: float | None
    real_s: float


class WaitErrors(NamedTuple):
    """Errors of the expected waits of one run.

    Attributes:
        num_asked: number of requests that were queued when they were asked about.
        num_unknown: number of those without an estimate.
        num_counted: number of those with an estimate that waited at least MIN_WAIT_S.
        median: median of |estimate / wait - 1|.
        p90: its 90th percentile.
        bias: median of estimate / wait.
    """

    num_asked: int
    num_unknown: int
    num_counted: int
    median: float
    p90: float
    bias: float

    @classmethod
    def of(cls, samples: Iterable[WaitSample]) -> "WaitErrors":
        """Return the errors of samples; infinite ones where none counts."""
        samples = list(samples)
        num_unknown = sum(sample.expected_s is None for sample in samples)
        ratios = np.array(
            [
                sample.expected_s / sample.real_s
                for sample in samples
                if sample.expected_s is not None and sample.real_s >= MIN_WAIT_S
            ]
        )
        if not len(ratios):
            return cls(len(samples), num_unknown, 0, np.inf, np.inf, np.inf)
        median, p90 = np.percentile(np.abs(ratios - 1), [50, 90])
        bias = float(np.median(ratios))
        return cls(len(samples), num_unknown, len(ratios), float(median), float(p90), bias)

    def line(self) -> str:
        """Return the errors in words."""
        if not self.num_counted:
            return f"no request with an estimate waited {MIN_WAIT_S:g} s: raise --request-rate"
        return (
            f"{self.num_asked} requests were queued, {self.num_unknown} of them without an"
            f" estimate; {self.num_counted} waited for {MIN_WAIT_S:g} s or more: error"
            f" {self.median:.1%} in the median, {self.p90:.1%} at p90; estimate / wait"
            f" {self.bias:.2f} in the median"
        )


def load(arguments: argparse.Namespace) -> list[TraceRequest]:
    """Return the requests: Poisson arrivals with independent lengths.

    Among them are a long prompt every --long-every seconds, and prompts with common beginnings.
    """
    source, groups = random.Random(arguments.seed), random.Random(f"{arguments.seed}/groups")
    num_requests, num_groups, long_every = (
        arguments.num_requests, arguments.prefix_groups, arguments.long_every,
    )  # fmt: skip
    requests, at, num_long = [], 0.0, 0
    for number in range(num_requests):
        if long_every and at > long_every * (num_long + 0.5):
            segment = num_requests + num_groups + num_long
            requests.append(TraceRequest(at, ((segment, LONG_INPUT),), LONG_OUTPUT))
            num_long += 1
        segments = [(number, arguments.input_len.draw(source))]
        if num_groups:
            segments.insert(0, (num_requests + groups.randrange(num_groups), arguments.prefix_len))
        num_new = arguments.max_new_tokens.draw(source)
        requests.append(TraceRequest(at, tuple(segments), num_new))
        at += source.expovariate(arguments.request_rate)
    return requests


def simulate(
    requests: list[TraceRequest], num_slots: int, ask_after_s: float, itl_target: float | None
) -> WaitErrors:
    """Return the errors in simulated time."""
    config = ServerConfig().replace(
        max_running_requests=num_slots, max_batch_size=num_slots, itl_target=itl_target
    )
    world = World(config, cost_model.load(cost_model.DEFAULT), PAGES, ask_after_s=ask_after_s)
    world.run(enumerate(requests))
    admitted_at = world.records["admitted"]
    return WaitErrors.of(
        WaitSample(expected.wait_s, float(admitted_at[index]) - expected.asked_at)
        for index, expected in world.records.expected_waits.items()
    )


class WaitMeasurement:
    """Requests to a server, and the questions about them."""

    def __init__(self, client: AsyncClient, ask_after_s: float, stop: list[str]) -> None:
        self._client = client
        self._ask_after_s = ask_after_s
        self._stop = stop
        self._new: list[tuple[float, RequestHandle]] = []
        self._expected: dict[str, tuple[float, float | None]] = {}

    async def run(self, requests: list[TraceRequest]) -> WaitErrors:
        """Send the requests at their times, and return the errors when all have ended."""
        vocab_size = (await self._client.info())["vocab_size"]
        began_at = clock.now()
        asking = asyncio.create_task(self._ask())
        ends = []
        for request in requests:
            await asyncio.sleep(max(0.0, began_at + request.at - clock.now()))
            params = SamplingParams(
                max_new_tokens=request.max_new_tokens, stop=self._stop, ignore_eos=not self._stop
            )
            ids = prompt_ids(request, vocab_size, seed=0)
            handle = self._client.submit(list(ids), params, stream=False)
            self._new.append((clock.now(), handle))
            ends.append(asyncio.create_task(handle.completion()))
        completions = await asyncio.gather(*ends)
        asking.cancel()
        samples = []
        for completion in completions:
            asked_at, expected_s = self._expected.get(completion.request_id, (0.0, None))
            if asked_at:
                samples.append(WaitSample(expected_s, completion.timings.admitted - asked_at))
        return WaitErrors.of(samples)

    async def _ask(self) -> None:
        while True:
            await asyncio.sleep(ASK_INTERVAL_S)
            due_at = clock.now() - self._ask_after_s
            due = [handle for sent_at, handle in self._new if sent_at <= due_at]
            self._new = [(sent_at, handle) for sent_at, handle in self._new if sent_at > due_at]
            for first in range(0, len(due), MAX_PROGRESS_IDS):
                await self._ask_about([h.request_id for h in due[first : first + MAX_PROGRESS_IDS]])

    async def _ask_about(self, request_ids: list[str]) -> None:
        asked_at = clock.now()
        for name, value in zip(request_ids, await self._client.progress(request_ids), strict=True):
            if value.state is RequestState.QUEUED:
                self._expected[name] = asked_at, value.wait_s


async def measure(arguments: argparse.Namespace) -> int:
    """Measure a server, print the errors, and return the exit code."""
    async with AsyncClient(arguments.endpoint) as client:
        run = WaitMeasurement(client, arguments.ask_after, arguments.stop)
        return report(await run.run(load(arguments)), arguments.limit)


def report(errors: WaitErrors, limit: float) -> int:
    """Print the errors, and return the exit code."""
    print(errors.line())
    return EXIT_OK if errors.median <= limit else EXIT_FAILED


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("bench.simulate.expected_wait", __doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--simulate", action="store_true", help="in simulated time")
    where.add_argument("--endpoint", help="of a server")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--request-rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--input-len", type=Lengths.parse, default=Lengths(16, 256))
    parser.add_argument("--max-new-tokens", type=Lengths.parse, default=Lengths(8, 128))
    parser.add_argument(
        "--long-every", type=float, metavar="S", help=f"seconds between prompts of {LONG_INPUT}"
    )
    parser.add_argument(
        "--prefix-groups",
        type=int,
        default=0,
        help="common beginnings; each prompt has one",
    )
    parser.add_argument("--prefix-len", type=int, default=1024, help="tokens of a common beginning")
    parser.add_argument("--slots", type=int, default=8, help="of the simulated server")
    parser.add_argument("--itl-target", type=float, metavar="MS", help="of the simulated server")
    parser.add_argument("--stop", action="append", default=[], help="stop string; may be repeated")
    parser.add_argument("--ask-after", type=float, default=0.5, metavar="S")
    parser.add_argument("--limit", type=float, default=0.25, help="largest good median error")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if not 0 < arguments.request_rate < float("inf"):
        raise ConfigError(f"--request-rate is {arguments.request_rate}: it must be positive")
    if arguments.num_requests < 1 or arguments.slots < 1:
        raise ConfigError("--num-requests and --slots must be positive")
    if arguments.prefix_groups < 0 or arguments.prefix_len < 1:
        raise ConfigError("--prefix-groups must be 0 or more, and --prefix-len positive")
    if arguments.long_every is not None and not arguments.long_every > 0:
        raise ConfigError(f"--long-every is {arguments.long_every}: it must be positive")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit code."""

    def work() -> int:
        arguments = _arguments(argv)
        if arguments.simulate:
            errors = simulate(
                load(arguments), arguments.slots, arguments.ask_after, arguments.itl_target
            )
            return report(errors, arguments.limit)
        return run_until_signal(measure(arguments))

    return run_command("bench.simulate.expected_wait", work)


if __name__ == "__main__":
    sys.exit(main())
