"""When to plan the next step: as late as the worker allows.

A plan that is made later knows of more requests: whoever arrives while a step runs is then in the
very next one. A plan that comes too late leaves the worker idle for one round trip (about half a
millisecond) and no longer, because a result is always answered at once.
"""

from collections import deque

from quadriga.wire.messages.worker import StepResult
from scheduler_proc.state.batch import ScheduleBatch

REMEMBERED = 8
"""Steps of one kind. The shortest of them is what a prediction goes by."""
LEAD_SECONDS = 0.002
LEAD_SHARE = 0.05
"""A plan is made so long before the predicted end, plus this share of the step: time to be woken,
to plan, and for the message to get there."""
PATIENCE = 0.2
"""Of the shortest step: the delay is small against what a request loses that just misses one."""
MAX_DELAY_S = 0.002
MAX_TOTAL_DELAY_S = 5 * MAX_DELAY_S
"""However many come."""

Kind = tuple[int, int]
"""Of a step: its mode, and its size in powers of two of tokens."""


class StepTimePredictor:
    """Predicts when the running step will end, from the recent ones of its kind.

    last_ended: when the last step did; 0.0: there was none.
    """

    def __init__(self) -> None:
        self._recent: dict[Kind, deque[float]] = {}
        self._shortest: dict[Kind, float] = {}
        self._last: dict[Kind, float] = {}
        self.last_ended = 0.0

    def learn(self, batch: ScheduleBatch, result: StepResult) -> None:
        """A step has ended."""
        seconds, tokens = result.ended - result.began, sum(batch.num_tokens)
        kind = _kind(batch, tokens)
        recent = self._recent.setdefault(kind, deque(maxlen=REMEMBERED))
        recent.append(seconds / tokens)
        self._shortest[kind] = min(recent)
        self._last[kind] = seconds
        self.last_ended = result.ended

    def predict(self, batch: ScheduleBatch) -> float:
        """Seconds that a step takes, rather too few; 0.0 for a kind that was never seen. Within
        one kind time is taken to grow with the tokens."""
        tokens = sum(batch.num_tokens)
        return self._shortest.get(_kind(batch, tokens), 0.0) * tokens

    def due(self, running: ScheduleBatch) -> float:
        """When the step after the running one must be planned."""
        seconds = self.predict(running)
        began = max(running.planned_at, self.last_ended)
        return began + seconds - LEAD_SECONDS - LEAD_SHARE * seconds

    @property
    def patience(self) -> float:
        """Seconds without another request after which an idle worker gets a step."""
        shortest = min(self._last.values(), default=1.0)
        return min(MAX_DELAY_S, PATIENCE * shortest)


class BatchDelay:
    """Until when an idle worker waits for those who come together: `until`, on the clock. Whoever
    just misses a step waits for the whole of it."""

    def __init__(self) -> None:
        self.until = self._latest = 0.0

    def came(self, now: float, patience: float) -> None:
        """Somebody did; the next one is waited for."""
        if self._latest + MAX_TOTAL_DELAY_S < now:  # those who came then have ended meanwhile
            self._latest = now + MAX_TOTAL_DELAY_S
        self.until = min(now + patience, self._latest)

    def left(self) -> None:
        """A step is planned for them."""
        self.until = self._latest = 0.0


def _kind(batch: ScheduleBatch, tokens: int) -> Kind:
    return batch.mode, tokens.bit_length()
