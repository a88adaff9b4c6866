"""How long steps take now, from the end of one to the end of the next."""

from quadriga.wire.messages.worker import StepResult
from scheduler_proc.planning.step_cost import StepCostModel
from scheduler_proc.state.batch import ScheduleBatch

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
