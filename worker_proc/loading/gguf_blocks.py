"""Decode GGUF's plain block formats, in which 32 neighbouring weights of a row share a scale.

Formats: https://github.com/ggml-org/ggml, ggml-common.h, block_q4_0, block_q4_1 and block_q8_0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
# Bytes of a block, by the name of its format.
BLOCK_KINDS = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Unpacked blocks, with the values code * scale + minimum.

    Attributes:
        codes: [rows, blocks, 32]: int8 around zero, or uint8 from 0 to 15 if there is a minimum.
        scale: [rows, blocks] float32 with values of float16.
        minimum: As `scale`, or None.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    @property
    def bits(self) -> int:
        """Bits in which the CPU kernels keep a code."""
        return 8 if self.minimum is None else 4

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "Blocks":
        """Apply a change of the rows to each tensor [rows, ...]."""
        minimum = None if self.minimum is None else change(self.minimum)
        return Blocks(change(self.codes), change(self.scale), minimum)

    def dense(self) -> Tensor:
        """Return the values [rows, weights of a row] in float32."""
        values = self.codes.float().mul_(self.scale.unsqueeze(-1))
        if self.minimum is not None:
            values.add_(self.minimum.unsqueeze(-1))
        return values.flatten(1)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a matrix as they are in the file.

    Attributes:
        kind: One of BLOCK_KINDS.
        data: [rows, bytes of a row] uint8.
    """

    kind: str
    data: Tensor

    @classmethod
    def quantize(cls, values: Tensor) -> "PackedRows":
        """Round values [rows, weights of a row] to Q8_0."""
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        data = quantize(values.float().numpy(), GGMLQuantizationType.Q8_0)
        return cls("Q8_0", torch.from_numpy(data))

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of weights in a row."""
        rows, row_bytes = self.data.shape
        return rows, row_bytes // BLOCK_KINDS[self.kind] * BLOCK

    def unpack(self) -> Blocks:
        """Return the codes, scales and minima of the blocks."""
        blocks = self.data.view(len(self.data), -1, BLOCK_KINDS[self.kind])
        scale = _halves(blocks[..., :2])
        if self.kind == "Q8_0":
            return Blocks(blocks[..., 2:].view(torch.int8), scale, None)
        pairs = blocks[..., -BLOCK // 2 :]
        codes = torch.cat((pairs & 15, pairs >> 4), -1)
        if self.kind == "Q4_0":
            return Blocks(codes.view(torch.int8).sub_(8), scale, None)
        return Blocks(codes, scale, _halves(blocks[..., 2:4]))

    def dense(self) -> Tensor:
        """Return the values [rows, weights of a row] in float32."""
        return self.unpack().dense()


def _halves(column: Tensor) -> Tensor:
    """Convert [rows, blocks, 2] bytes of float16 to [rows, blocks] float32."""
    return column.contiguous().view(torch.float16).squeeze(-1).float()
