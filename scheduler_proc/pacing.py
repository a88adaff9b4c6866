"""How long a step will take, so that the next one can be planned as late as the worker allows.

A plan that is made later knows of more requests: whoever arrives while a step runs is then in the
very next one. A plan that comes too late leaves the worker idle for one round trip (about half a
millisecond) and no longer, because a result is always answered at once.
"""

from collections import deque

from scheduler_proc.batch import ScheduleBatch

UNKNOWN = 1.0
REMEMBERED = 8
"""Steps of one kind. The shortest of them is what a prediction goes by."""
LEAD_SECONDS = 0.002
LEAD_SHARE = 0.05
"""A plan is made so long before the predicted end, plus this share of the step: time to be woken,
to plan, and for the message to get there."""


class StepTimes:
    """Durations of the recent steps, by mode and size (powers of two of tokens)."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}
        self._shortest: dict[tuple[int, int], float] = {}
        self._last: dict[tuple[int, int], float] = {}

    def learn(self, batch: ScheduleBatch, seconds: float) -> None:
        """A step ran so long."""
        tokens = sum(batch.num_tokens)
        kind = (batch.mode, tokens.bit_length())
        recent = self._recent.setdefault(kind, deque(maxlen=REMEMBERED))
        recent.append(seconds / tokens)
        self._shortest[kind] = min(recent)
        self._last[kind] = seconds

    def predict(self, batch: ScheduleBatch) -> float:
        """Seconds, rather too few; 0.0 for a kind of step that was never seen.

        Within one kind time is taken to grow with the tokens.
        """
        tokens = sum(batch.num_tokens)
        return self._shortest.get((batch.mode, tokens.bit_length()), 0.0) * tokens

    @property
    def shortest(self) -> float:
        """Seconds of the shortest step seen of late, for all its tokens; UNKNOWN before any."""
        return min(self._last.values(), default=UNKNOWN)

    def lead(self, seconds: float) -> float:
        """How long before the end of such a step the next plan is made."""
        return LEAD_SECONDS + LEAD_SHARE * seconds
