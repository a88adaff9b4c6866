"""The plain block formats of GGUF: 32 neighbouring weights share a scale.

Formats: https://github.com/ggml-org/ggml, ggml-common.h, block_q4_0, block_q4_1 and block_q8_0.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 32
BLOCK_KINDS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of a block, by the name of its format."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """number * scale + least: numbers [blocks, 32] (uint8, or int8 with Q8_0), scale and least
    [blocks, 1] float32."""

    numbers: Tensor
    scale: Tensor
    least: Tensor | None

    @classmethod
    def parse(cls, raw: npt.NDArray[np.uint8], kind: str) -> "Blocks":
        """raw: the bytes of whole blocks."""
        blocks = torch.from_numpy(np.array(raw)).view(-1, BLOCK_KINDS[kind])
        scale = _halves(blocks[:, :2])
        if kind == "Q8_0":
            return cls(blocks[:, 2:].view(torch.int8), scale, None)
        start = 4 if kind == "Q4_1" else 2
        pairs = blocks[:, start:]
        numbers = torch.cat((pairs & 15, pairs >> 4), 1)
        return cls(numbers, scale, _halves(blocks[:, 2:4]) if kind == "Q4_1" else -8 * scale)

    def dense(self) -> Tensor:
        """[weights] float32."""
        values = self.numbers.float().mul_(self.scale)
        return (values if self.least is None else values.add_(self.least)).flatten()


def _halves(column: Tensor) -> Tensor:
    """[blocks, 2] bytes of float16 to [blocks, 1] float32."""
    return column.contiguous().view(torch.float16).float()
