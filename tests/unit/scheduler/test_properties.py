"""Random arrivals, lengths, aborts and tiny pools under every policy and batch mode.

Each request ends exactly once with the tokens of the reference, and after every step free + cached
+ held pages are all pages. `python -m tests.unit.chaos --steps 1000000` does the same for longer.
"""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quadriga.server.config.engine_args import BATCH_MODES, POLICIES, SchedulerArgs
from tests.faults.inject import retract_one
from tests.unit.chaos import ADAPTERS, PREFIXES, Chaos, random_life

PIN_COUNTERS = (
    "cache_pins_gave_way_total",
    "cache_pins_over_limit_total",
    "cache_pins_expired_total",
    "cache_pins_released_total",
)
pytestmark = pytest.mark.timeout(400)  # shrinking a failure takes a while


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler under events that hypothesis chooses, and shrinks when a check fails."""

    chaos: Chaos

    @initialize(
        policy=st.sampled_from(POLICIES),
        mode=st.sampled_from((*BATCH_MODES, "static")),
        width=st.integers(1, 5),
        prefill_width=st.one_of(st.none(), st.integers(1, 5)),
        running=st.integers(1, 6),
        budget=st.integers(1, 20),
        chunk=st.sampled_from([None, -1, 1, 3, 8]),
        num_pages=st.integers(2, 12),
        page_size=st.integers(1, 8),
        at_once=st.booleans(),
        fair=st.booleans(),
        window=st.sampled_from([0, 0, 1, 3, 8]),
        max_loras=st.integers(1, 3),
        more_in_memory=st.integers(0, 2),
    )
    def start(
        self, policy: str, mode: str, width: int, prefill_width: int | None, running: int,
        budget: int, chunk: int | None, num_pages: int, page_size: int, at_once: bool, fair: bool,
        window: int, max_loras: int, more_in_memory: int,
    ) -> None:  # fmt: skip
        flags: dict[str, Any] = {"batch_mode": mode} if mode in BATCH_MODES else {"batching": mode}
        args = SchedulerArgs(
            max_batch_size=width,
            prefill_max_batch_size=prefill_width,
            max_running_requests=running,
            prefill_max_tokens=budget,
            chunked_prefill_size=chunk,
            **flags,
            schedule_policy=policy,
            plan_at_once=at_once,
            fair_clients=fair,
            max_loras=max_loras,
            max_cpu_loras=max_loras + more_in_memory,
        )
        args.validate()
        self.chaos = Chaos(args, num_pages, page_size, window=window)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(3, 99), min_size=1, max_size=6),
        max_new_tokens=st.integers(1, 12),
        ignore_eos=st.booleans(),
        client=st.sampled_from([b"c", b"d"]),
        priority=st.integers(-20, 20),
        timeout_s=st.one_of(st.none(), st.just(0.05)),
        adapter=st.sampled_from(["", "", *ADAPTERS]),
    )
    def submit(self, prefix: list[int], tail: list[int], **fields: Any) -> None:
        self.chaos.submit(prefix + tail, **fields)

    @rule()
    def step(self) -> None:
        self.chaos.world.step()

    @rule(seconds=st.sampled_from([0.001, 0.1]))
    def wait(self, seconds: float) -> None:
        world = self.chaos.world
        if world.worker.done_at is None:
            world.wake(world.worker.now + seconds)

    @rule(number=st.integers(0, 5))
    def retract(self, number: int) -> None:
        retract_one(self.chaos.world.scheduler, number)

    @precondition(lambda self: self.chaos.sent)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.chaos.abort(data.draw(st.integers(0, len(self.chaos.sent) - 1)))

    @precondition(lambda self: self.chaos.world.detok.open)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.chaos.stop(data.draw(st.sampled_from(sorted(self.chaos.world.detok.open))))

    @invariant()
    def no_page_is_lost(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.finish()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("method", ["ngram", "auto"])
@pytest.mark.parametrize("window", [0, 3])
def test_lives_of_random_servers_that_guess(method: str, window: int) -> None:
    num_right = 0
    for number in range(25):
        source = random.Random(f"{method}/{number}")
        chaos = random_life(source, 100, window=window, speculative_method=method)
        num_right += chaos.world.scheduler.info()["spec_decode_num_accepted_tokens_total"]
    assert num_right > 100


@pytest.mark.parametrize("seed", range(8))
def test_lives_of_random_servers(seed: int) -> None:
    for number in range(25):
        random_life(random.Random(f"{seed}/{number}"), 100, suspends=number % 2 == 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 5])
def test_lives_of_random_servers_that_keep_prefixes(seed: int, window: int) -> None:
    counts: Counter[str] = Counter()
    for number in range(25):
        source = random.Random(f"pins/{seed}/{window}/{number}")
        chaos = random_life(source, 100, window=window, suspends=number % 2 == 0, has_pins=True)
        info = chaos.world.scheduler.info()
        counts.update({name: info[name] for name in PIN_COUNTERS})
    assert all(counts[name] for name in PIN_COUNTERS), "the load has not tried all of it"


@pytest.mark.parametrize("seed", range(4))
def test_lives_of_random_servers_with_adapters(seed: int) -> None:
    for number in range(25):
        source = random.Random(f"adapters/{seed}/{number}")
        random_life(source, 100, suspends=number % 2 == 0, has_adapters=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [0, 5])
def test_lives_of_random_servers_whose_requests_fork(seed: int, window: int) -> None:
    num_forks = num_cached = 0
    for number in range(12):
        source = random.Random(f"forks/{seed}/{window}/{number}")
        has_adapters, suspends = number % 3 == 0, number % 2 == 0
        method = "ngram" if number % 4 == 3 else "none"
        chaos = random_life(
            source, 60, window=window, has_adapters=has_adapters, suspends=suspends,
            has_forks=True, speculative_method=method,
        )  # fmt: skip
        num_forks += sum(sent.is_fork for sent in chaos.sent.values())
        num_cached += chaos.world.scheduler.info()["cached_tokens_total"]
    assert num_forks > 100
    assert num_cached > 100
