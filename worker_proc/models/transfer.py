"""Copy between host and device without waiting for the device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Waits for the end of a copy and returns the values.
Fetch = Callable[[], npt.NDArray[Any]]
# [rows]; a tensor on a GPU. On a CPU an array is faster for a few numbers, as torch's code would
# have to be loaded into the caches again in every step.
TokenIds = Tensor | npt.NDArray[np.int64]
ALIGNMENT = 8  # bytes; where each array begins that is copied together with others


def send(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device; on a CPU, share its memory.

    To a GPU the copy goes through pinned memory, which torch does not reuse before it was read.
    """
    on_host = torch.from_numpy(values)
    if device.type == "cuda":
        return on_host.pin_memory().to(device, non_blocking=True)
    return on_host if device.type == "cpu" else on_host.to(device)


def send_into(place: Tensor, values: npt.NDArray[Any], before_copy: Callable[[], None]) -> None:
    """Copy an array to a tensor of its shape on the device.

    `before_copy` is called when all work of the host is done, before the first work of the device.
    """
    on_host = torch.from_numpy(values)
    if place.device.type == "cuda":
        on_host = on_host.pin_memory()
    before_copy()
    place.copy_(on_host, non_blocking=True)


def send_all(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Copy arrays of any types to the device in one copy; on a CPU, share their memory."""
    if device.type == "cpu":
        return [send(values, device) for values in arrays]
    begins = np.cumsum([0, *(-(-values.nbytes // ALIGNMENT) * ALIGNMENT for values in arrays)])
    joined = np.zeros(begins[-1], dtype=np.uint8)
    for begin, values in zip(begins.tolist(), arrays, strict=False):
        joined[begin : begin + values.nbytes] = values.ravel().view(np.uint8)
    on_device = send(joined, device)
    return [
        on_device[begin : begin + values.nbytes].view(torch_dtype(values)).view(values.shape)
        for begin, values in zip(begins.tolist(), arrays, strict=False)
    ]


def torch_dtype(values: npt.NDArray[Any]) -> torch.dtype:
    """Return the dtype of a tensor that shares the array's memory."""
    return torch.from_numpy(np.empty(0, dtype=values.dtype)).dtype


class DeviceToHostCopier:
    """Copies results to the host.

    On a GPU, copies have their own stream, so that the next step does not wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def begin(self, values: TokenIds) -> Fetch:
        """Start a copy, and return a function that waits for its end in any thread.

        On a CPU the values must not change before the function is called.
        """
        fetch = self.begin_all(values)
        return lambda: fetch()[0]

    def begin_all(self, *arrays: TokenIds) -> Callable[[], list[npt.NDArray[Any]]]:
        """Start copies as `begin` does, and return a function that waits for all of them."""
        tensors = [values for values in arrays if isinstance(values, Tensor)]
        if self._stream is None or not tensors:
            return lambda: [
                values.cpu().numpy() if isinstance(values, Tensor) else values for values in arrays
            ]
        ready, copied = torch.cuda.Event(), torch.cuda.Event(blocking=True)
        on_host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=True) for v in tensors]
        ready.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for host, values in zip(on_host, tensors, strict=True):
                host.copy_(values, non_blocking=True)
                values.record_stream(self._stream)
            copied.record(self._stream)

        def fetch() -> list[npt.NDArray[Any]]:
            copied.synchronize()
            copies = iter(on_host)
            return [next(copies).numpy() if isinstance(v, Tensor) else v for v in arrays]

        return fetch
