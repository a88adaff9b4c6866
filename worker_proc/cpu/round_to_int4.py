"""Round weights to 4 bits so that the products change as little as possible.

For each group of 32 inputs the kernels try several scales and minima, fit each to its codes by
least squares, and keep the best. The error of a weight counts by the importance of its input, as in
activation-aware quantization (Lin et al. 2023, https://arxiv.org/abs/2306.00978) and ggml's
importance matrices.
"""

import ctypes
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.cpu.build import load_kernels
from worker_proc.loading.gguf_blocks import GROUP, Blocks

# Of the mean importance: an input that never differed from zero still has weights to round.
MIN_IMPORTANCE = 1e-6


def round_to_int4(weight: Tensor, importance: Tensor | None = None) -> Blocks:
    """Round a matrix to blocks of Q4_1.

    Args:
        weight: [outputs, inputs].
        importance: [inputs] factors of the squared errors; None: all are equal.
    """
    outputs, inputs = weight.shape
    padding = (0, -inputs % GROUP)
    values = F.pad(weight.float(), padding).contiguous()
    factors = F.pad(_factors(inputs, importance), padding).contiguous()
    num_groups = values.shape[1] // GROUP
    codes = torch.empty(outputs, num_groups, GROUP, dtype=torch.uint8)
    scale, minimum = torch.empty(2, outputs, num_groups)
    arrays, sizes = (codes, scale, minimum), (outputs, num_groups)
    _kernels().quadriga_round_to_int4(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, factors)),
        *map(ctypes.c_int64, sizes),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in arrays),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return Blocks("Q4_1", codes, scale.half(), minimum.half())


def _factors(inputs: int, importance: Tensor | None) -> Tensor:
    """Return positive factors [inputs] float32 whose mean is about 1."""
    if importance is None or not importance.any():
        return torch.ones(inputs)
    relative = importance.float() / importance.float().mean()
    return relative + MIN_IMPORTANCE


@cache
def _kernels() -> ctypes.CDLL:
    return load_kernels()
