"""How long a step takes, learned from the steps that ran.

`StepCostModel` learns the prices of a step's work; `StepSpeed` corrects them by the time that
passes from the end of one step to the end of the next.
"""

import math

from quadriga.wire.worker import StepResult
from scheduler_proc.state.batch import ScheduleBatch

# How long a step takes, learned from the steps that ran.
#
# The seconds of a step are taken as a sum: so many for each step, for each decode row, for each
# prompt token, and for each pair of a prompt token and a token that it attends to. The last term
# is what makes a chunk at the end of a long prompt take several times as long as one at its
# beginning. The four prices follow the steps that run, by normalised least mean squares (Widrow
# and Hoff, 1960) with prices that are never negative: after each step the prediction for such a
# step moves a quarter of the way to what was measured, and all of it after the first ones. So it
# is right for the steps that are being made, whatever the machine, the model and the other
# programs do.

# Amounts of each kind of work that are taken to be alike: of a step, of decode rows, of prompt
# tokens and of pairs.
SCALES = (1.0, 32.0, 128.0, 128.0 * 1024.0)
RATE = 0.25  # of the way to a measured step
# With prompts, and without: until prices are known well enough to tell a disturbed step.
NUM_STARTING_STEPS = 16
MAX_RATIO = 2.0  # of a step's seconds to the expected ones: one that took longer was disturbed


class StepCostModel:
    """The expected seconds of a step."""

    def __init__(self) -> None:
        self._prices = [0.0] * len(SCALES)
        self._num_steps = [0, 0]  # without prompts, and with them

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts was measured."""
        return self._num_steps[True] > 0

    def observe(self, batch: ScheduleBatch, seconds: float) -> None:
        """Take in the seconds of a step."""
        if seconds <= 0.0 or batch.is_empty:
            return
        amounts = _amounts(batch.num_decodes, batch.num_prompt_tokens, batch.num_pairs)
        expected = _product(self._prices, amounts)
        rate, has_prompts = 1.0, batch.num_prompts > 0
        if self._num_steps[has_prompts] >= NUM_STARTING_STEPS:
            rate, seconds = RATE, min(seconds, MAX_RATIO * expected)
        self._num_steps[has_prompts] += 1
        change = rate * (seconds - expected) / _product(amounts, amounts)
        self._prices = [
            max(0.0, price + change * amount)
            for price, amount in zip(self._prices, amounts, strict=True)
        ]

    def seconds(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds of a step.

        Args:
            num_decodes: number of decode rows.
            num_tokens: number of prompt tokens.
            num_pairs: number of pairs of a prompt token and a token that it attends to.
        """
        return _product(self._prices, _amounts(num_decodes, num_tokens, num_pairs))

    def tokens_within(self, seconds: float, context: int) -> int:
        """Return how many prompt tokens take so many seconds more, after `context` tokens."""
        per_token, per_pair = (self._prices[i] / SCALES[i] for i in (2, 3))
        first = per_token + per_pair * context
        if seconds <= 0.0:
            return 0
        if per_pair <= 0.0:
            return int(min(seconds / first, 1e9)) if first > 0.0 else 1_000_000_000
        # n tokens take n * first + n * n / 2 * per_pair seconds.
        root = math.sqrt(first * first + 2 * per_pair * seconds)
        return int((root - first) / per_pair)


def _amounts(num_decodes: int, num_tokens: int, num_pairs: int) -> tuple[float, ...]:
    return (
        1.0,
        num_decodes / SCALES[1],
        num_tokens / SCALES[2],
        num_pairs / SCALES[3],
    )


def _product(one: "list[float] | tuple[float, ...]", other: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


# How long steps take now, from the end of one to the end of the next.

# Weight of the last step in the averages, once there are many.
MIN_WEIGHT = 0.03
# A worker that waits longer for its plan had nothing to do.
MAX_GAP_S = 0.05


class RunningMean:
    """A mean in which earlier values count less and less."""

    def __init__(self) -> None:
        self._count = 0
        self.value = 0.0

    def observe(self, value: float) -> None:
        """Take in a value."""
        self._count += 1
        self.value += max(MIN_WEIGHT, 1 / self._count) * (value - self.value)


class StepSpeed:
    """The seconds of a step by its prices, with the time between steps.

    The prices (step_cost.py) follow the last steps quickly. What they are wrong by on average, and
    the time in which the worker waits for its next plan, are in the ratio of what steps have taken
    to what was expected, of steps with prompts and of others.
    """

    def __init__(self) -> None:
        self._costs = StepCostModel()
        self._measured_s = RunningMean(), RunningMean()  # without prompts, and with them
        self._expected_s = RunningMean(), RunningMean()
        self._last_ended = 0.0

    def on_step(self, batch: ScheduleBatch, result: StepResult, costs: StepCostModel) -> None:
        """Take in a step that ended, and the prices of steps."""
        has_gap = batch.planned_at - self._last_ended > MAX_GAP_S
        seconds = result.ended - (batch.planned_at if has_gap else self._last_ended)
        self._last_ended, self._costs = result.ended, costs
        has_prompts = batch.num_prompts > 0
        expected = costs.seconds(batch.num_decodes, batch.num_prompt_tokens, batch.num_pairs)
        self._measured_s[has_prompts].observe(seconds)
        self._expected_s[has_prompts].observe(expected)

    def seconds(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds of a step, as StepCostModel does; 0.0 before the first one."""
        has_prompts = num_tokens > 0
        expected = self._expected_s[has_prompts].value
        ratio = self._measured_s[has_prompts].value / expected if expected else 1.0
        return ratio * self._costs.seconds(num_decodes, num_tokens, num_pairs)
