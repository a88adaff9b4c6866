"""Expected waits against the waits that follow, in simulated time, which is deterministic."""

import random
from typing import NamedTuple

import numpy as np
import pytest

from bench.load.synthetic import Lengths
from bench.scenarios import LONG_INPUT, LONG_OUTPUT
from quadriga.server.config.server_config import ServerConfig
from simulator import cost_model
from simulator.trace import TraceRequest
from simulator.world import World
from tests.everything import more

MAX_MEDIAN_ERROR = 0.12
ASK_AFTER_S = 0.5
MIN_WAIT_S = 1.0  # of a request that counts, after the question
PAGES = 4096
PREFIX_TOKENS = 1024


class Load(NamedTuple):
    """A load of one server, and flags of the server.

    Attributes:
        rate: arrivals a second, at random times.
        slots: of the server.
        num_prompt, num_new: tokens of the prompts and answers.
        long_every: seconds between long prompts; 0: there are none.
        num_prefixes: common prefixes, of which each prompt has one; 0: none has any.
        itl_target: of the server, in ms.
    """

    rate: float = 8.0
    slots: int = 8
    num_prompt: Lengths = Lengths(16, 64)
    num_new: Lengths = Lengths(8, 64)
    num_requests: int = 1000
    long_every: float = 0.0
    num_prefixes: int = 0
    itl_target: float | None = None

    def requests(self) -> list[TraceRequest]:
        """Return the requests."""
        source, prefixes = random.Random(0), random.Random("0/groups")
        requests, at, num_long = [], 0.0, 0
        for number in range(self.num_requests):
            if self.long_every and at > self.long_every * (num_long + 0.5):
                segment = self.num_requests + self.num_prefixes + num_long
                requests.append(TraceRequest(at, ((segment, LONG_INPUT),), LONG_OUTPUT))
                num_long += 1
            segments = [(number, self.num_prompt.draw(source))]
            if self.num_prefixes:
                prefix = self.num_requests + prefixes.randrange(self.num_prefixes)
                segments.insert(0, (prefix, PREFIX_TOKENS))
            requests.append(TraceRequest(at, tuple(segments), self.num_new.draw(source)))
            at += source.expovariate(self.rate)
        return requests


@pytest.mark.parametrize(
    "load",
    [
        Load(30, slots=16),
        more(Load(20, slots=32)),
        Load(20, 256, Lengths(64, 256), Lengths(2, 8), num_requests=400),
        Load(9, num_new=Lengths(16, 48), long_every=20),
        more(Load(12, slots=32, num_new=Lengths(16, 48), long_every=15, itl_target=45)),
        more(Load(num_prefixes=16)),
        Load(num_prefixes=64),
    ],
)
def test_the_median_error_is_below_12_percent(load: Load) -> None:
    config = ServerConfig().replace(
        max_running_requests=load.slots, max_batch_size=load.slots, itl_target=load.itl_target
    )
    world = World(config, cost_model.load(cost_model.DEFAULT), PAGES, ask_after_s=ASK_AFTER_S)
    world.run(enumerate(load.requests()))
    admitted_at = world.records["admitted"]
    errors = []
    for index, expected in world.records.expected_waits.items():
        assert expected.wait_s is not None, "nothing is unknown once steps were measured"
        wait_s = float(admitted_at[index]) - expected.asked_at
        if wait_s >= MIN_WAIT_S:
            errors.append(abs(expected.wait_s / wait_s - 1))
    assert len(errors) > 0.2 * load.num_requests, "so many have to wait"
    assert np.median(errors) < MAX_MEDIAN_ERROR
