"""How long steps take now, from the end of one to the end of the next."""

from quadriga.wire.messages.worker import StepResult
from scheduler_proc.state.batch import ForwardMode, ScheduleBatch

# Weight of the last step in the average.
LAST_WEIGHT = 0.1


class StepSpeed:
    """Averages of the last steps.

    Attributes:
        decode_s: seconds of a step without prompts; None before the first one.
    """

    def __init__(self) -> None:
        self.decode_s: float | None = None
        self._prefill_s = 0.0
        self._prefill_tokens = 0.0
        self._last_ended = 0.0

    def on_step(self, batch: ScheduleBatch, result: StepResult) -> None:
        """Take in a step that ended."""
        seconds = result.ended - max(self._last_ended, batch.planned_at)
        self._last_ended = result.ended
        if batch.mode is ForwardMode.DECODE:
            before = seconds if self.decode_s is None else self.decode_s
            self.decode_s = before + LAST_WEIGHT * (seconds - before)
            return
        if batch.num_decodes:  # the decode rows of a step take their time, too
            seconds = max(0.0, seconds - (self.decode_s or 0.0))
        num_tokens = sum(batch.num_tokens) - batch.num_decodes
        self._prefill_s += LAST_WEIGHT * (seconds - self._prefill_s)
        self._prefill_tokens += LAST_WEIGHT * (num_tokens - self._prefill_tokens)

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds for which a prompt token delays all else; 0.0 before the first prompt."""
        return self._prefill_s / self._prefill_tokens if self._prefill_tokens else 0.0
