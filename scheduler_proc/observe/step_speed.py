"""How long steps take now, from the end of one to the end of the next."""

from quadriga.wire.messages.worker import StepResult
from scheduler_proc.state.batch import ForwardMode, ScheduleBatch

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
    """Averages of the last steps."""

    def __init__(self) -> None:
        self._decode_s = RunningMean()
        self._prefill_s = RunningMean()
        self._prefill_tokens = RunningMean()
        self._last_ended = 0.0

    def on_step(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Take in a step that ended."""
        has_gap = batch.planned_at - self._last_ended > MAX_GAP_S
        seconds = result.ended - (batch.planned_at if has_gap else self._last_ended)
        self._last_ended = result.ended
        if batch.mode is ForwardMode.DECODE:
            self._decode_s.observe(seconds)
            return
        if batch.num_decodes:  # the decode rows of a step take their time, too
            seconds = max(0.0, seconds - self._decode_s.value)
        self._prefill_s.observe(seconds)
        self._prefill_tokens.observe(sum(batch.num_tokens) - batch.num_decodes)

    @property
    def decode_s(self) -> float | None:
        """Seconds of a step without prompts; None before the first one."""
        return self._decode_s.value or None

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds for which a prompt token delays all else; 0.0 before the first prompt."""
        num_tokens = self._prefill_tokens.value
        return self._prefill_s.value / num_tokens if num_tokens else 0.0
