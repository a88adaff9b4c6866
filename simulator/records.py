"""Records of a simulation's requests, and samples of its replicas over time."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quadriga.wire.to_detok import StreamEnd

Ints = npt.NDArray[np.int64]


# Of a growing array, in values.
INITIAL_SIZE = 1024


class Growing:
    """A numpy array that grows by doubling."""

    def __init__(self, dtype: type) -> None:
        self._values: npt.NDArray[Any] = np.zeros(INITIAL_SIZE, dtype)
        self.length = 0

    def extend(self, values: npt.NDArray[Any]) -> None:
        """Append values."""
        self.reserve(self.length + len(values))
        self._values[self.length : self.length + len(values)] = values
        self.length += len(values)

    def reserve(self, length: int) -> None:
        """Grow the capacity to `length` values; new ones are 0."""
        if length > len(self._values):
            size = max(length, 2 * len(self._values))
            self._values = np.concatenate(
                [self._values, np.zeros(size - len(self._values), self._values.dtype)]
            )

    @property
    def buffer(self) -> npt.NDArray[Any]:
        """The whole array, beyond the length too."""
        return self._values

    @property
    def values(self) -> npt.NDArray[Any]:
        """The values that were appended."""
        return self._values[: self.length]


class Records:
    """Records of all requests by their index in the trace. Times are simulated seconds."""

    TIMES = ("submitted", "tokenized", "admitted", "first_token", "last_token", "finished")
    TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens")

    def __init__(self) -> None:
        self.length = 0
        self._columns = {name: Growing(np.float64) for name in self.TIMES}
        self._columns |= {name: Growing(np.int32) for name in self.TOKENS}
        self.expected_waits: dict[int, ExpectedWait] = {}
        self.gaps = Growing(np.float32)
        self.errors: dict[int, str] = {}

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """Return a column with one value per request."""
        return self._columns[name].buffer[: self.length]

    def add(self, index: int, submitted: float, tokenized: float) -> None:
        """Record a request that was sent."""
        self.length = max(self.length, index + 1)
        for column in self._columns.values():
            column.reserve(self.length)
        self["submitted"][index] = submitted
        self["tokenized"][index] = tokenized

    def take_tokens(self, indexes: Ints, when: float) -> None:
        """Record one token of each of these requests."""
        last = self["last_token"]
        before = last[indexes]
        self["first_token"][indexes[before == 0]] = when
        self.gaps.extend((when - before)[before > 0])
        last[indexes] = when
        self["completion_tokens"][indexes] += 1

    def end(self, index: int, closed: StreamEnd, delivered: float) -> None:
        """Record the terminal message of a request."""
        self["finished"][index] = delivered
        self["admitted"][index] = closed.admitted_at
        self["first_token"][index] = closed.first_token_at
        self["prompt_tokens"][index] = closed.prompt_tokens
        self["cached_tokens"][index] = closed.cached_tokens
        if closed.error is not None:
            self.errors[index] = closed.error.code

    def fail(self, index: int, code: str, when: float) -> None:
        """Record a request that was refused before the scheduler."""
        self["finished"][index] = when
        self.errors[index] = code


@dataclass(frozen=True, slots=True)
class ExpectedWait:
    """The estimate of a queued request's wait, in seconds, and when it was made; None: unknown."""

    asked_at: float
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class RecordSample:
    """Totals of all replicas at one moment: requests, and KV pages held and cached.

    Attributes:
        replicas: number of replicas that serve.
        uneven_rows, uneven_queues: 99th percentile over mean of the replicas' running requests, and
            of their prompt tokens that wait for their computation; 1.0: all have the same.
    """

    time: float
    running: int
    waiting: int
    pages_held: int
    pages_cached: int
    replicas: int = 1
    uneven_rows: float = 1.0
    uneven_queues: float = 1.0
