"""Round weights in groups of 32 inputs to the blocks of Q8_0 or Q4_1."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.cpu.round_to_int4 import round_to_int4
from worker_proc.loading.gguf_blocks import GROUP, Blocks

GROUP_SIZE = GROUP  # neighbouring inputs that share a scale
MIN_SCALE = 1e-8  # a group whose scale is smaller becomes all zeros


def quantize(weight: Tensor, bits: int, importance: Tensor | None = None) -> Blocks:
    """Round a matrix [outputs, inputs].

    8 bits are symmetric around zero. In 4 bits the scale and minimum of a group have the least
    squared error, by the importance [inputs] of the inputs.
    """
    return _round_to_int8(weight) if bits == 8 else round_to_int4(weight, importance)


def _round_to_int8(weight: Tensor) -> Blocks:
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE))
    groups = groups.unflatten(1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(-1) / 127).half()
    divisor = scale.float().clamp(min=MIN_SCALE).unsqueeze(-1)
    codes = (groups / divisor).round().clamp(-127, 127)
    return Blocks("Q8_0", codes.to(torch.int8).view(torch.uint8) ^ 128, scale)
