"""The simulated worker: steps take the time of the cost model, and tokens come from a hash."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from bench.load.trace import MIN_TOKEN_ID
from bench.metrics.percentiles import MS
from bench.simulate.clock import Clock
from bench.simulate.cost_model import CostModel, features_of
from quadriga.wire.messages.worker import StepPlan, StepResult
from worker_proc.startup.prefill_tuning import (
    CANDIDATE_SIZES,
    GPU_PREFILL_TOKENS,
    smallest_good_size,
)

Ints = npt.NDArray[np.int64]


def draw_ids(seeds: Ints, positions: Ints, vocab_size: int) -> Ints:
    """Return the tokens of the simulated model at positions, different for each seed."""
    mixed = (seeds * 1_000_003 + positions) * 2_654_435_761 & 0x7FFF_FFFF_FFFF
    return MIN_TOKEN_ID + (mixed >> 13) % (vocab_size - MIN_TOKEN_ID)


class StepWork(NamedTuple):
    """What a plan computes.

    Attributes:
        token_ids: int32 bytes, one per row; -1 for a row that does not sample.
        num_tokens: [rows] tokens that the step computes.
        computed: [rows] tokens that were computed before it.
        num_samples: number of rows that sample.
    """

    token_ids: bytes
    num_tokens: Ints
    computed: Ints
    num_samples: int


class SimulatedSlots:
    """The number of known and of computed tokens of each slot; tokens come from a hash."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known = np.zeros(num_slots, np.int64)
        self._computed = np.zeros(num_slots, np.int64)
        self._seeds = np.zeros(num_slots, np.int64)

    def apply(self, plan: StepPlan) -> StepWork:
        """Apply a plan to the slots, and return its work."""
        for new in plan.new:
            self._known[new.slot] = len(new.token_ids) // 4
            self._computed[new.slot] = new.computed
            self._seeds[new.slot] = new.seed
        slots = np.frombuffer(plan.slots, "<i4")
        num_tokens = np.frombuffer(plan.num_tokens, "<i4").astype(np.int64)
        before, known = self._computed[slots], self._known[slots]
        after = before + num_tokens
        samples = after == known
        assert (after <= known).all(), "a token is computed that is not known"
        self._computed[slots] = after
        self._known[slots] = known + samples
        tokens = np.where(samples, draw_ids(self._seeds[slots], known, self._vocab_size), -1)
        return StepWork(tokens.astype("<i4").tobytes(), num_tokens, before, int(samples.sum()))


class SimulatedWorker:
    """A worker without a model.

    `deliver` is called with the time at which the scheduler has a result, and the result.
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
        self._window = model.measured_on.window
        self._clock = clock
        self._deliver = deliver
        self._slots = SimulatedSlots(num_slots, model.measured_on.vocab_size)
        self._free_at = 0.0
        self.steps = 0
        self.rows = 0
        self.busy = 0.0

    def send(self, message: msgspec.Struct) -> None:
        """Receive the scheduler's message to the worker."""
        if not isinstance(message, StepPlan):
            return
        work = self._slots.apply(message)
        began = max(self._clock.now + self._plan_delay, self._free_at + self._gap)
        seconds = self._seconds(work)
        self._free_at = ended = began + seconds
        self.steps += 1
        self.rows += len(work.num_tokens)
        self.busy += seconds
        result = StepResult(message.step, work.token_ids, began, ended)
        self._deliver(ended + self._result_delay, result)

    def _seconds(self, work: StepWork) -> float:
        features = features_of(work.num_tokens, work.computed, work.num_samples, self._window)
        prices = zip(self._prices, msgspec.structs.astuple(features), strict=True)
        return float(sum(price * amount for price, amount in prices))


def tune_prefill_size(model: CostModel) -> int:
    """Return the prefill size that the worker would choose at its start."""
    if model.measured_on.device != "cpu":
        return GPU_PREFILL_TOKENS

    def seconds_of(tokens: int) -> float:
        window = model.measured_on.window
        features = features_of(np.array([tokens]), np.zeros(1, np.int64), 1, window)
        return model.step_ms(features) / MS

    return smallest_good_size(list(CANDIDATE_SIZES), seconds_of)
