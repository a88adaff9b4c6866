"""Measure when steps start and end, even if they are launched before they run."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from quadriga.clock import now

# Returns the start and the end of a step in Unix seconds; on a GPU, waits for its end.
Times = Callable[[], tuple[float, float]]


class RunningStep(Protocol):
    """A step that is being launched."""

    def start(self) -> None:
        """Note that the next kernel is the step's first one; of several calls the last counts."""

    def stop(self) -> Times:
        """Note that the whole step has been launched."""


def step_clock(device: torch.device) -> Callable[[], RunningStep]:
    """Return the function to call when the host begins with a step.

    On a GPU, the time of a step is measured by the GPU from the first kernel on, so what the host
    does before, while the GPU may be idle, is no part of it. On a CPU the host measures all of it.
    """
    return partial(_GPUStep, device) if device.type == "cuda" else HostStep


class HostStep:
    """A step that is measured by the host."""

    def __init__(self) -> None:
        self._started = now()

    def start(self) -> None:
        """Do nothing: the host's work before the first kernel is a part of the step."""

    def stop(self) -> Times:
        """Return the times, whose end is that of the call."""
        return lambda: (self._started, now())


class _GPUStep:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._started = torch.cuda.Event(enable_timing=True)
        self._is_started = False

    def start(self) -> None:
        self._started.record(self._stream)
        self._is_started = True

    def stop(self) -> Times:
        if not self._is_started:
            self.start()  # a step without rows
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        ended.record(self._stream)

        def times() -> tuple[float, float]:
            ended.synchronize()
            ended_at = now()
            return ended_at - self._started.elapsed_time(ended) / 1000, ended_at

        return times
