"""How long steps take, learned from the steps that ran.

`StepCosts` has three answers, for three questions: what a step will take by the work in it
(`seconds`, `tokens_within`), how soon a step that runs may end (`earliest_s`), and how long steps
take with the time between them (`wall_seconds`).
"""

import math
from collections import deque

from quadriga.wire.worker import StepResult
from scheduler_proc.state.batch import ScheduleBatch

# Amounts of each kind of work that are taken to be alike: of a step, of decode rows, of prompt
# tokens and of pairs.
SCALES = (1.0, 32.0, 128.0, 128.0 * 1024.0)
RATE = 0.25  # of the way to a measured step
# With prompts, and without: until prices are known well enough to tell a disturbed step.
NUM_STARTING_STEPS = 16
MAX_RATIO = 2.0  # of a step's seconds to the expected ones: one that took longer was disturbed
NUM_REMEMBERED_STEPS = 8  # of one kind; the earliest end goes by the shortest of them
MIN_WEIGHT = 0.03  # of the last step in the means of wall time, once there are many
MAX_GAP_S = 0.05  # a worker that waits longer for its plan had nothing to do

StepKind = tuple[int, int]  # forward mode, and number of tokens in powers of two
Amounts = tuple[float, ...]


class StepCosts:
    """The expected seconds of steps.

    The seconds of a step are taken as a sum: so many for each step, for each decode row, for each
    prompt token, and for each pair of a prompt token and a token that it attends to. The last term
    is what makes a chunk at the end of a long prompt take several times as long as one at its
    beginning. The four prices follow the steps that run, by normalised least mean squares (Widrow
    and Hoff, 1960) with prices that are never negative: after each step the prediction for such a
    step moves a quarter of the way to what was measured, and all of it after the first ones. So it
    is right for the steps that are being made, whatever the machine, the model and the other
    programs do.

    What the prices are wrong by on average, and the time in which the worker waits for its next
    plan, are in the ratio of what steps have taken to what was expected, of steps with prompts and
    of others.

    Attributes:
        last_ended: end of the last step; 0.0 before the first one.
        prompt_s: what steps have taken longer because of their prompts, since the start.
        num_prompt_tokens: prompt tokens of these steps.
        num_rows: decode rows of all steps.
        rows_s: the sum over these rows of what their step would have taken without prompts.
    """

    def __init__(self) -> None:
        self.last_ended = 0.0
        self.prompt_s, self.num_prompt_tokens = 0.0, 0
        self.rows_s, self.num_rows = 0.0, 0
        self._recent: dict[StepKind, deque[float]] = {}  # seconds a token
        self._last_s: dict[StepKind, float] = {}
        # Without prompts, and with them.
        self._num_wall = [0, 0]
        self._wall_s = [0.0, 0.0]
        self._expected_s = [0.0, 0.0]
        self.on_new_worker()

    def on_new_worker(self) -> None:
        """Forget the prices: a new worker may have other ones."""
        self._prices: Amounts = (0.0,) * len(SCALES)
        self._num_steps = [0, 0]  # without prompts, and with them

    def observe(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Take in a step that ended."""
        seconds, num_tokens = result.ended - result.began, sum(batch.num_tokens)
        kind = _kind(batch, num_tokens)
        recent = self._recent.setdefault(kind, deque(maxlen=NUM_REMEMBERED_STEPS))
        recent.append(seconds / num_tokens)
        self._last_s[kind] = seconds
        if seconds > 0.0:
            self._observe_prices(batch, seconds)
        without = seconds
        if batch.num_prompts:
            without = self.seconds(batch.num_decodes) if batch.num_decodes else 0.0
            self.prompt_s += max(0.0, seconds - without)
            self.num_prompt_tokens += batch.num_prompt_tokens
        self.rows_s += batch.num_decodes * min(seconds, without)
        self.num_rows += batch.num_decodes
        self._observe_wall(batch, result.ended)
        self.last_ended = result.ended

    # --- by the work of a step --------------------------------------------------------------------

    @property
    def knows_prompts(self) -> bool:
        """Whether a step with prompts was measured."""
        return self._num_steps[True] > 0

    def seconds(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds of a step.

        Args:
            num_decodes: number of decode rows.
            num_tokens: number of prompt tokens.
            num_pairs: number of pairs of a prompt token and a token that it attends to.
        """
        return _product(self._prices, _amounts(num_decodes, num_tokens, num_pairs))

    def wall_seconds(self, num_decodes: int, num_tokens: int = 0, num_pairs: int = 0) -> float:
        """Return the seconds from the end of a step to that of the next; 0.0 before any step."""
        has_prompts = num_tokens > 0
        expected = self._expected_s[has_prompts]
        ratio = self._wall_s[has_prompts] / expected if expected else 1.0
        return ratio * self.seconds(num_decodes, num_tokens, num_pairs)

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

    def _observe_prices(self, batch: ScheduleBatch, seconds: float) -> None:
        amounts = _amounts(batch.num_decodes, batch.num_prompt_tokens, batch.num_pairs)
        expected = _product(self._prices, amounts)
        rate, has_prompts = 1.0, batch.num_prompts > 0
        if self._num_steps[has_prompts] >= NUM_STARTING_STEPS:
            rate, seconds = RATE, min(seconds, MAX_RATIO * expected)
        self._num_steps[has_prompts] += 1
        change = rate * (seconds - expected) / _product(amounts, amounts)
        self._prices = tuple(
            max(0.0, price + change * amount)
            for price, amount in zip(self._prices, amounts, strict=True)
        )

    def _observe_wall(self, batch: ScheduleBatch, ended: float) -> None:
        has_gap = batch.planned_at - self.last_ended > MAX_GAP_S
        wall_s = ended - (batch.planned_at if has_gap else self.last_ended)
        expected_s = self.seconds(batch.num_decodes, batch.num_prompt_tokens, batch.num_pairs)
        has_prompts = batch.num_prompts > 0
        self._num_wall[has_prompts] += 1
        weight = max(MIN_WEIGHT, 1 / self._num_wall[has_prompts])
        self._wall_s[has_prompts] += weight * (wall_s - self._wall_s[has_prompts])
        self._expected_s[has_prompts] += weight * (expected_s - self._expected_s[has_prompts])

    # --- by the last steps of a kind --------------------------------------------------------------

    def earliest_s(self, batch: ScheduleBatch) -> float:
        """Return the seconds of a step, rather too few; 0.0 for a kind not seen before.

        Within a kind, time is taken to grow with the tokens.
        """
        num_tokens = sum(batch.num_tokens)
        return min(self._recent.get(_kind(batch, num_tokens), (0.0,))) * num_tokens

    @property
    def shortest_s(self) -> float:
        """Seconds of the shortest kind of step, as its last one took; 1.0 before any step."""
        return min(self._last_s.values(), default=1.0)


def _kind(batch: ScheduleBatch, num_tokens: int) -> StepKind:
    return batch.mode, num_tokens.bit_length()


def _amounts(num_decodes: int, num_tokens: int, num_pairs: int) -> Amounts:
    return (1.0, num_decodes / SCALES[1], num_tokens / SCALES[2], num_pairs / SCALES[3])


def _product(one: Amounts, other: Amounts) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
