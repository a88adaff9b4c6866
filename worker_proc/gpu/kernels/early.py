"""Kernels that begin while the one before them still runs (programmatic dependent launch).

https://docs.nvidia.com/cuda/cuda-c-programming-guide/
"""

from functools import cache

import torch
import triton
import triton.language as tl

CAPABILITY = (9, 0)  # compute capability of the first GPUs that can do so


@cache
def can_begin_early(device: torch.device) -> bool:
    """Return whether kernels on a device can begin early."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Let the next kernel begin, once all programs of this one have; it waits for their end."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
