"""Measure how fast a device reads its memory."""

import time
from statistics import median

import torch

NUM_ROUNDS = 20


def bytes_per_second(device: torch.device, size: int) -> float:
    """Return the speed of summing a tensor of `size` bytes."""
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(NUM_ROUNDS):
        began = time.perf_counter()
        float(values.sum())
        seconds.append(time.perf_counter() - began)
    return size / median(seconds[NUM_ROUNDS // 4 :])
