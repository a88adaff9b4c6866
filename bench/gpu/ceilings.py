"""Measure what a device can do at most: read and copy memory, multiply matrices."""

import time
from collections.abc import Callable
from statistics import median

import torch

NUM_ROUNDS, NUM_CALLS = 12, 5
# So large that the start of a kernel, about 5 us, is no part of the result.
GPU_BYTES, CPU_BYTES = 8 * 2**30, 2**28


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, on a GPU by its own clock.

    On a GPU several calls are launched at once, so that it does not wait for the host.
    """
    call()
    if device.type != "cuda":
        return median(_host_seconds(call) for _ in range(NUM_ROUNDS))
    seconds: list[float] = []
    for _ in range(NUM_ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(NUM_CALLS):
            call()
        ended.record()
        ended.synchronize()
        seconds.append(float(began.elapsed_time(ended)) / 1000 / NUM_CALLS)
    return median(seconds)


def _host_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def default_bytes(device: torch.device) -> int:
    """Return the size of the tensor that is read: far more than caches hold."""
    return GPU_BYTES if device.type == "cuda" else CPU_BYTES


def read_bytes_per_second(device: torch.device, size: int = 0) -> float:
    """Return the speed of summing a tensor of `size` bytes; 0: the default size."""
    size = size or default_bytes(device)
    values = torch.ones(size // 4, device=device)
    return size / seconds_of(values.sum, device)


def copied_bytes_per_second(device: torch.device, size: int = 0) -> float:
    """Return the bytes per second that are read, and written, by a copy."""
    size = size or default_bytes(device)
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def flops_per_second(device: torch.device, width: int, dtype: torch.dtype) -> float:
    """Return the rate of multiplying two square matrices of `width` rows."""
    a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return float(2 * width**3 / seconds_of(lambda: a @ b, device))
