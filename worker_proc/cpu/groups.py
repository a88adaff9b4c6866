"""Quantised weights in groups of 32 inputs, as quantised.h multiplies them: rounded here, or with
the very numbers of a GGUF."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.loading.gguf_blocks import BLOCK, Blocks, PackedRows

GROUP = BLOCK
"""Neighbouring inputs that share a scale."""
MIN_SCALE = 1e-8
"""Below it a group is all zeros."""
GREATEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Groups:
    """numbers [outputs, groups, 32] uint8, scale and least [outputs, groups] float32 with the
    values of float16. 8 bits: (number - 128) * scale. 4 bits: number * scale + least."""

    numbers: Tensor
    scale: Tensor
    least: Tensor | None

    @property
    def bits(self) -> int:
        return 8 if self.least is None else 4

    def by_rows(self, change: Callable[[Tensor], Tensor]) -> "Groups":
        """The same with other rows: change goes for everything that has [outputs, ...]."""
        least = None if self.least is None else change(self.least)
        return Groups(change(self.numbers), change(self.scale), least)


def rounded(weight: Tensor, bits: int) -> Groups:
    """[outputs, inputs] to 8 bits around zero, or to 4 bits between each group's least and
    greatest."""
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    return _in_8_bits(groups) if bits == 8 else _in_4_bits(groups)


def as_stored(parts: Sequence[PackedRows]) -> Groups:
    """The rows of all parts, in 4 bits where all of them fit, else in 8 bits.

    Exact, but for Q4_1 beside parts of 8 bits: its least values are not a multiple of its scale, so
    that it is rounded to 8 bits.
    """
    blocks = [part.unpacked() for part in parts]
    fit = all(_fits_4_bits(part, b) for part, b in zip(parts, blocks, strict=True))
    return _joined([_as_4_bits(b) if fit else _as_8_bits(b) for b in blocks])


def _in_8_bits(groups: Tensor) -> Groups:
    scale = _as_half(groups.abs().amax(-1) / 127)
    numbers = (groups / scale.clamp(min=MIN_SCALE).unsqueeze(-1)).round().clamp(-127, 127)
    return Groups((numbers + 128).to(torch.uint8), scale, None)


def _in_4_bits(groups: Tensor) -> Groups:
    least = _as_half(groups.amin(-1))
    scale = _as_half((groups.amax(-1) - least) / 15)
    steps = (groups - least.unsqueeze(-1)) / scale.clamp(min=MIN_SCALE).unsqueeze(-1)
    return Groups(steps.round().clamp(0, 15).to(torch.uint8), scale, least)


def _as_half(values: Tensor) -> Tensor:
    """Rounded as the panels keep them."""
    return values.half().float()


def _fits_4_bits(part: PackedRows, blocks: Blocks) -> bool:
    """Q4_0's least value is 8 scales below zero: exact, unless float16 ends before it."""
    if part.kind == "Q4_0":
        return bool((blocks.scale.abs() * 8 <= GREATEST_HALF).all())
    return part.kind == "Q4_1"


def _as_4_bits(blocks: Blocks) -> Groups:
    if blocks.least is None:
        return Groups((blocks.numbers + 8).view(torch.uint8), blocks.scale, -8 * blocks.scale)
    return Groups(blocks.numbers, blocks.scale, blocks.least)


def _as_8_bits(blocks: Blocks) -> Groups:
    if blocks.least is None:
        return Groups((blocks.numbers.short() + 128).to(torch.uint8), blocks.scale, None)
    return rounded(blocks.dense(), 8)


def _joined(parts: Sequence[Groups]) -> Groups:
    if len(parts) == 1:
        return parts[0]
    least = [part.least for part in parts if part.least is not None]
    return Groups(
        torch.cat([part.numbers for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(least) if least else None,
    )
