"""Measure when steps start and end, even if they are launched before they run."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from quadriga.clock import now

# Returns the start and the end of a step in Unix seconds; on a GPU, waits for its end.
Times = Callable[[], tuple[float, float]]


class Running(Protocol):
    """A step that is being launched."""

    def stop(self) -> Times:
        """Note that the whole step has been launched."""


def step_clock(device: torch.device) -> Callable[[], Running]:
    """Return the function to call when a step starts.

    On a GPU, the time of a step is measured by the GPU, from the end of the previous step on; on a
    CPU, by the host.
    """
    return partial(_GPUStep, device) if device.type == "cuda" else _HostStep


class _HostStep:
    def __init__(self) -> None:
        self._started = now()

    def stop(self) -> Times:
        return lambda: (self._started, now())


class _GPUStep:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._started = torch.cuda.Event(enable_timing=True)
        self._started.record(self._stream)

    def stop(self) -> Times:
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        ended.record(self._stream)

        def times() -> tuple[float, float]:
            ended.synchronize()
            ended_at = now()
            return ended_at - self._started.elapsed_time(ended) / 1000, ended_at

        return times
