"""The simulated worker: steps take the time of the cost model, and tokens come from a hash."""

from collections.abc import Callable

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


class SimulatedWorker:
    """A worker without a model; of each slot it counts the known and the computed tokens.

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
        self._vocab_size = model.measured_on.vocab_size
        self._window = model.measured_on.window
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
        """Receive the scheduler's message to the worker."""
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
        assert (after <= known).all(), "a token is computed that is not known"
        self._computed[slots] = after
        self._known[slots] = known + samples
        tokens = np.where(samples, draw_ids(self._seeds[slots], known, self._vocab_size), -1)
        features = features_of(num_tokens, before, int(samples.sum()), self._window)
        prices = zip(self._prices, msgspec.structs.astuple(features), strict=True)
        return tokens.astype("<i4").tobytes(), sum(price * amount for price, amount in prices)


def tune_prefill_size(model: CostModel) -> int:
    """Return the prefill size that the worker would choose at its start."""
    if model.measured_on.device != "cpu":
        return GPU_PREFILL_TOKENS

    def seconds_of(tokens: int) -> float:
        window = model.measured_on.window
        features = features_of(np.array([tokens]), np.zeros(1, np.int64), 1, window)
        return model.step_ms(features) / MS

    return smallest_good_size(list(CANDIDATE_SIZES), seconds_of)
