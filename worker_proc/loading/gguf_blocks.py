"""The plain block formats of GGUF: 32 neighbouring weights of a row share a scale.

Formats: https://github.com/ggml-org/ggml, ggml-common.h, block_q4_0, block_q4_1 and block_q8_0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
BLOCK_KINDS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}
"""Bytes of a block, by the name of its format."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """number * scale + least: numbers [rows, blocks, 32], int8 around zero or, where there is a
    least value, uint8 from 0 to 15; scale and least [rows, blocks] float32."""

    numbers: Tensor
    scale: Tensor
    least: Tensor | None

    def dense(self) -> Tensor:
        """[rows, weights of a row] float32."""
        values = self.numbers.float().mul_(self.scale.unsqueeze(-1))
        return (values if self.least is None else values.add_(self.least.unsqueeze(-1))).flatten(1)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a matrix as the file has them. kind: one of BLOCK_KINDS; data: [rows, bytes of a
    row] uint8."""

    kind: str
    data: Tensor

    @classmethod
    def rounded(cls, values: Tensor) -> "PackedRows":
        """Numbers of another format [rows, weights of a row] as Q8_0."""
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        data = quantize(values.float().numpy(), GGMLQuantizationType.Q8_0)
        return cls("Q8_0", torch.from_numpy(data))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and weights of a row."""
        rows, row_bytes = self.data.shape
        return rows, row_bytes // BLOCK_KINDS[self.kind] * BLOCK

    def unpacked(self) -> Blocks:
        blocks = self.data.view(len(self.data), -1, BLOCK_KINDS[self.kind])
        scale = _halves(blocks[..., :2])
        if self.kind == "Q8_0":
            return Blocks(blocks[..., 2:].view(torch.int8), scale, None)
        pairs = blocks[..., -BLOCK // 2 :]
        numbers = torch.cat((pairs & 15, pairs >> 4), -1)
        if self.kind == "Q4_0":
            return Blocks(numbers.view(torch.int8).sub_(8), scale, None)
        return Blocks(numbers, scale, _halves(blocks[..., 2:4]))

    def dense(self) -> Tensor:
        """[rows, weights of a row] float32."""
        return self.unpacked().dense()


def _halves(column: Tensor) -> Tensor:
    """[rows, blocks, 2] bytes of float16 to [rows, blocks] float32."""
    return column.contiguous().view(torch.float16).squeeze(-1).float()
