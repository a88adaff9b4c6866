"""Between host and device: in without waiting for the device, out beside its next step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Fetch = Callable[[], npt.NDArray[Any]]
TokenIds = Tensor | npt.NDArray[np.int64]
"""[rows]; on a card a tensor, on a CPU either: a few numbers need nothing of torch there, whose
code is out of the caches after every step."""


def send(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. To a card it goes through pinned memory, which torch does not use
    again before it was read; on a CPU it stays where it is."""
    there = torch.from_numpy(values)
    if device.type != "cuda":
        return there.to(device)
    return there.pin_memory().to(device, non_blocking=True)


def send_all(device: torch.device, *arrays: npt.NDArray[np.int64]) -> list[Tensor]:
    """Several arrays, to a card in one copy."""
    if device.type != "cuda":
        return [send(values, device) for values in arrays]
    together = send(np.concatenate([values.ravel() for values in arrays]), device)
    parts = together.split([values.size for values in arrays])
    return [part.view(values.shape) for part, values in zip(parts, arrays, strict=True)]


class DeviceToHostCopier:
    """Where results come down. A card copies them on a stream of their own, so that its next step
    does not wait for it, and whoever fetches them sleeps until they are there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, values: TokenIds) -> Fetch:
        """Start to copy; the function that is returned, in whatever thread, waits for the end. On a
        CPU the values must stand until then."""
        if isinstance(values, np.ndarray):
            return lambda: values
        if self._stream is None:
            return lambda: values.cpu().numpy()
        ready, landed = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        ready.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            host.copy_(values, non_blocking=True)
            values.record_stream(self._stream)
            landed.record(self._stream)

        def fetch() -> npt.NDArray[Any]:
            landed.synchronize()
            return host.numpy()

        return fetch
