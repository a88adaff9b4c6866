"""How many replicas a load needs. Without clock and sockets, so that the simulator has it.

The load is the number of open requests, which the frontend counts exactly, and not a rate: rates of
prompts and tokens depend on what runs beside them, and say nothing about a server without load.

    more replicas:   open > target * replicas,                           for up_after_s
    one replica less: open <= DOWN_SHARE * target * (replicas - 1),      for down_after_s

Between the two bounds nothing changes, so that a steady load does not make replicas come and go.
"""

import math
from dataclasses import dataclass

# A replica leaves where the others would have at most this share of their target.
DOWN_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class ScalingLimits:
    """Bounds of the number of replicas, and when it changes.

    Attributes:
        min_replicas, max_replicas: bounds of the number.
        target: open requests for each replica.
        up_after_s: seconds of too much load before replicas are added.
        down_after_s: seconds of too little load before each replica that leaves.
    """

    min_replicas: int
    max_replicas: int
    target: int
    up_after_s: float
    down_after_s: float


class Scaling:
    """Decide how many replicas there should be.

    Args:
        limits: bounds and times.
        num_replicas: number at first.

    Attributes:
        num_replicas: number that was decided last, whether all of them serve yet or not.
    """

    def __init__(self, limits: ScalingLimits, num_replicas: int) -> None:
        self._limits = limits
        self._num_open = 0
        self._too_many_since: float | None = None
        self._too_few_since: float | None = None
        self.num_replicas = num_replicas

    def on_load(self, num_open: int, now: float) -> None:
        """Note the number of open requests, which holds until the next call."""
        self._num_open = num_open
        self._too_many_since = _since(self._too_many_since, self._is_too_many, now)
        self._too_few_since = _since(self._too_few_since, self._is_too_few, now)

    @property
    def _is_too_many(self) -> bool:
        limits = self._limits
        has_room = self.num_replicas < limits.max_replicas
        return has_room and self._num_open > limits.target * self.num_replicas

    @property
    def _is_too_few(self) -> bool:
        limits, num_left = self._limits, self.num_replicas - 1
        return num_left >= limits.min_replicas and (
            self._num_open <= DOWN_SHARE * limits.target * num_left
        )

    @property
    def wake_at(self) -> float | None:
        """When the next decision is due, if the load stays as it is; None: never."""
        limits = self._limits
        due = [
            since + after
            for since, after in (
                (self._too_many_since, limits.up_after_s),
                (self._too_few_since, limits.down_after_s),
            )
            if since is not None
        ]
        return min(due, default=None)

    def decide(self, now: float) -> int:
        """Return how many replicas there should be: any number more, or one less than before."""
        limits, many, few = self._limits, self._too_many_since, self._too_few_since
        if many is not None and now >= many + limits.up_after_s:
            needed = math.ceil(self._num_open / limits.target)
            self.num_replicas = min(limits.max_replicas, needed)
        elif few is not None and now >= few + limits.down_after_s:
            self.num_replicas -= 1
            self._too_few_since = None
        self.on_load(self._num_open, now)
        return self.num_replicas


def _since(before: float | None, is_so: bool, now: float) -> float | None:
    if not is_so:
        return None
    return now if before is None else before
