"""How long a step takes, learned from the steps that ran.

The seconds of a step are taken as a sum: so many for each step, for each decode row, for each
prompt token, and for each pair of a prompt token and a token that it attends to. The last term is
what makes a chunk at the end of a long prompt take several times as long as one at its beginning.
The four prices follow the steps that run, by normalised least mean squares (Widrow and Hoff, 1960)
with prices that are never negative: after each step the prediction for such a step moves a quarter
of the way to what was measured, and all of it after the first ones. So it is right for the steps
that are being made, whatever the machine, the model and the other programs do.
"""

import math

from scheduler_proc.state.batch import ScheduleBatch

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
