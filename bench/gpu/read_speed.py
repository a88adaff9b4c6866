"""How fast a device reads its memory."""

import time
from statistics import median

import torch

ROUNDS = 20


def bytes_per_second(device: torch.device, size: int) -> float:
    """By adding up a tensor of so many bytes."""
    values = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        float(values.sum())
        seconds.append(time.perf_counter() - began)
    return size / median(seconds[ROUNDS // 4 :])
