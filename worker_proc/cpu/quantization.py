"""Quantise weights in groups of 32 inputs, as quantised.h multiplies them.

Weights are rounded here, or keep the codes of a GGUF.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.loading.gguf_blocks import BLOCK, Blocks, PackedRows

GROUP_SIZE = BLOCK  # neighbouring inputs that share a scale
MIN_SCALE = 1e-8  # a group whose scale is smaller becomes all zeros
MAX_FLOAT16 = torch.finfo(torch.float16).max


def quantize(weight: Tensor, bits: int) -> Blocks:
    """Round a matrix [outputs, inputs].

    8 bits are symmetric around zero; 4 bits go from a group's minimum to its maximum.
    """
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE))
    groups = groups.unflatten(1, (-1, GROUP_SIZE))
    return _quantize_8_bits(groups) if bits == 8 else _quantize_4_bits(groups)


def quantized_as_in_gguf(parts: Sequence[PackedRows]) -> Blocks:
    """Join the rows of all parts, in 4 bits if all of them fit, else in 8 bits.

    The values are exact, except for Q4_1 beside parts of 8 bits: its minima are not multiples of
    its scales, so it is rounded to 8 bits.
    """
    blocks = [part.unpack() for part in parts]
    fit = all(_fits_4_bits(part, b) for part, b in zip(parts, blocks, strict=True))
    return _join([_to_4_bits(b) if fit else _to_8_bits(b) for b in blocks])


def _quantize_8_bits(groups: Tensor) -> Blocks:
    scale = _round_to_float16(groups.abs().amax(-1) / 127)
    codes = (groups / scale.clamp(min=MIN_SCALE).unsqueeze(-1)).round().clamp(-127, 127)
    return Blocks(codes.to(torch.int8), scale, None)


def _quantize_4_bits(groups: Tensor) -> Blocks:
    minimum = _round_to_float16(groups.amin(-1))
    scale = _round_to_float16((groups.amax(-1) - minimum) / 15)
    codes = (groups - minimum.unsqueeze(-1)) / scale.clamp(min=MIN_SCALE).unsqueeze(-1)
    return Blocks(codes.round().clamp(0, 15).to(torch.uint8), scale, minimum)


def _round_to_float16(values: Tensor) -> Tensor:
    """Round to float16, in which the panels store scales, and return float32."""
    return values.half().float()


def _fits_4_bits(part: PackedRows, blocks: Blocks) -> bool:
    """Return whether 4 bits hold the part exactly.

    The minimum of Q4_0 is 8 scales below zero, which can be beyond the range of float16.
    """
    if part.kind == "Q4_0":
        return bool((blocks.scale.abs() * 8 <= MAX_FLOAT16).all())
    return part.kind == "Q4_1"


def _to_4_bits(blocks: Blocks) -> Blocks:
    if blocks.minimum is not None:
        return blocks
    return Blocks((blocks.codes + 8).view(torch.uint8), blocks.scale, -8 * blocks.scale)


def _to_8_bits(blocks: Blocks) -> Blocks:
    return blocks if blocks.minimum is None else quantize(blocks.dense(), 8)


def _join(parts: Sequence[Blocks]) -> Blocks:
    if len(parts) == 1:
        return parts[0]
    minima = [part.minimum for part in parts if part.minimum is not None]
    return Blocks(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(minima) if minima else None,
    )
