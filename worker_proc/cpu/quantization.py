"""Round weights in groups of 32 inputs to the blocks of Q8_0 or Q4_1."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.loading.gguf_blocks import GROUP, Blocks

GROUP_SIZE = GROUP  # neighbouring inputs that share a scale
MIN_SCALE = 1e-8  # a group whose scale is smaller becomes all zeros


def quantize(weight: Tensor, bits: int) -> Blocks:
    """Round a matrix [outputs, inputs].

    8 bits are symmetric around zero; 4 bits go from a group's minimum to its maximum.
    """
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE))
    groups = groups.unflatten(1, (-1, GROUP_SIZE))
    return _quantize_8_bits(groups) if bits == 8 else _quantize_4_bits(groups)


def _quantize_8_bits(groups: Tensor) -> Blocks:
    scale = (groups.abs().amax(-1) / 127).half()
    codes = (groups / _divisor(scale)).round().clamp(-127, 127)
    return Blocks("Q8_0", codes.to(torch.int8).view(torch.uint8) ^ 128, scale)


def _quantize_4_bits(groups: Tensor) -> Blocks:
    minimum = groups.amin(-1).half()
    scale = ((groups.amax(-1) - minimum.float()) / 15).half()
    codes = (groups - minimum.float().unsqueeze(-1)) / _divisor(scale)
    return Blocks("Q4_1", codes.round().clamp(0, 15).to(torch.uint8), scale, minimum)


def _divisor(scale: Tensor) -> Tensor:
    return scale.float().clamp(min=MIN_SCALE).unsqueeze(-1)
