"""Counters of the scheduler, for Info and for the bench."""

from collections import deque
from dataclasses import dataclass, field

from quadriga.messages.public import InfoValues
from quadriga.messages.worker import StepResult
from scheduler_proc.batch import ForwardMode, ScheduleBatch

RECENT_STEPS = 4096


@dataclass(slots=True)
class Statistics:
    """Totals since start.

    Gaps: worker idle time between two steps, the second already planned. late_plans: steps whose
    plan was not there when the one before ended, though somebody was running.
    """

    steps: int = 0
    prefill_steps: int = 0
    late_plans: int = 0
    busy_seconds: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    ended: dict[str, int] = field(
        default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0}
    )
    _gaps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _last_ended: float = 0.0

    def count_step(self, batch: ScheduleBatch, result: StepResult) -> None:
        self.steps += 1
        self.prefill_steps += batch.mode is not ForwardMode.DECODE
        self.busy_seconds += result.ended - result.began
        if batch.planned_at < self._last_ended:
            self._gaps.append(result.began - self._last_ended)
        elif batch.num_decodes:
            self.late_plans += 1
        self._last_ended = result.ended

    def gap_ms(self, share: float) -> float:
        """A percentile of the recent gaps in ms; 0.0 where there was none."""
        gaps = sorted(self._gaps)
        return 1000 * gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else 0.0

    def info(self) -> InfoValues:
        """As docs/protocol.md lists them."""
        return {
            "steps": self.steps,
            "prefill_steps": self.prefill_steps,
            "late_plans": self.late_plans,
            "busy_seconds": self.busy_seconds,
            "step_gap_ms_p50": self.gap_ms(0.5),
            "step_gap_ms_p99": self.gap_ms(0.99),
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generation_tokens,
            "cached_tokens_total": self.cached_tokens,
            "ended": dict(self.ended),
        }
