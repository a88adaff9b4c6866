"""Weights in the form in which the kernels multiply them, and memory for them."""

import mmap

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
UNIT_BYTES = 4
GROUP = 32
"""Neighbouring inputs that share a scale."""
LEAST_SCALE = 1e-8
"""Below it a group is all zeros."""


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def to_panels(weight: Tensor) -> Tensor:
    """[outputs, inputs] to [panels, depth, 16] int32: 16 outputs side by side, and for each depth
    the 4 bytes of one float32 input or two bfloat16 ones. Filled up with zeros."""
    pack = UNIT_BYTES // weight.dtype.itemsize
    outputs, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % pack, 0, -outputs % LANES)).contiguous()
    units = weight.view(torch.int32).view(-1, LANES, weight.shape[1] // pack)
    panels = empty(units.numel() * UNIT_BYTES).view(torch.int32)
    panels = panels.view(units.shape[0], units.shape[2], LANES)
    return panels.copy_(units.transpose(1, 2))


def to_quantised_panels(weight: Tensor, bits: int) -> Tensor:
    """[outputs, inputs] to [panels, panel_units] int32, as quantised.h says: 8 bits around zero, or
    4 bits between each group's least and greatest."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, -inputs % GROUP, 0, -outputs % LANES))
    groups = padded.view(-1, LANES, padded.shape[1] // GROUP, GROUP)
    numbers, *factors = _in_8_bits(groups) if bits == 8 else _in_4_bits(groups)
    units = numbers.view(*groups.shape[:3], GROUP // UNIT_BYTES, UNIT_BYTES).permute(0, 2, 3, 1, 4)
    if bits == 4:
        low, high = units.chunk(2, 2)
        units = low | high << 4
    parts = [units.flatten(1)]
    parts += [f.transpose(1, 2).flatten(1).half().view(torch.uint8) for f in factors]
    panels = torch.cat(parts, 1)
    return empty(panels.numel()).view(panels.shape).copy_(panels).view(torch.int32)


def _in_8_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 32] to numbers around 128 [..., 32] uint8 and scales [...]."""
    scale = _as_stored(groups.abs().amax(-1) / 127)
    numbers = (groups / scale.clamp(min=LEAST_SCALE).unsqueeze(-1)).round().clamp(-127, 127)
    return (numbers + 128).to(torch.uint8), scale


def _in_4_bits(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[..., 32] to numbers from 0 to 15 [..., 32] uint8, scales and least values [...]."""
    least = _as_stored(groups.amin(-1))
    scale = _as_stored((groups.amax(-1) - least) / 15)
    steps = (groups - least.unsqueeze(-1)) / scale.clamp(min=LEAST_SCALE).unsqueeze(-1)
    return steps.round().clamp(0, 15).to(torch.uint8), scale, least


def _as_stored(values: Tensor) -> Tensor:
    """Rounded as the panels keep them."""
    return values.half().float()


def interleaved(weight: Tensor) -> Tensor:
    """Gate and up [2 * inner, ...] so that 16 of the one and 16 of the other take turns; inner is
    filled up with zeros to a multiple of 16."""
    inner = len(weight) // 2
    padding = [0, 0] * (weight.dim() - 1) + [0, -inner % LANES]
    gate, up = (F.pad(part, padding) for part in weight.split(inner))
    pairs = torch.stack((gate.unflatten(0, (-1, LANES)), up.unflatten(0, (-1, LANES))), 1)
    return pairs.flatten(0, 2)


def empty(size: int) -> Tensor:
    """`size` bytes, zero, in large pages where the system has them: a pass over the weights then
    waits less for address translation."""
    length = max(size, 1)
    memory = mmap.mmap(-1, length)
    if hasattr(mmap, "MADV_HUGEPAGE") and length >= 2**21:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)[:size])
