"""When steps began and ended, where they are launched ahead of their time."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from quadriga.clock import now

Times = Callable[[], tuple[float, float]]
"""When a step began and ended, in Unix seconds; on a card, once it has ended."""


class Running(Protocol):
    def stop(self) -> Times:
        """All of the step has been launched."""


def step_clock(device: torch.device) -> Callable[[], Running]:
    """What is called as a step begins. On a card the time of a step is what the card says, from
    when it had nothing left of the one before; on a CPU what the host says."""
    return partial(_OnCard, device) if device.type == "cuda" else _OnHost


class _OnHost:
    def __init__(self) -> None:
        self._began = now()

    def stop(self) -> Times:
        return lambda: (self._began, now())


class _OnCard:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._began = torch.cuda.Event(enable_timing=True)
        self._began.record(self._stream)

    def stop(self) -> Times:
        ended = torch.cuda.Event(enable_timing=True, blocking=True)
        ended.record(self._stream)

        def times() -> tuple[float, float]:
            ended.synchronize()
            ended_at = now()
            return ended_at - self._began.elapsed_time(ended) / 1000, ended_at

        return times
