"""Takes a model down as a list of operations for the kernels."""

import torch
from torch import Tensor, nn

from worker_proc.attention.base import AttentionShape
from worker_proc.cpu.groups import GROUP, Groups, as_stored, rounded
from worker_proc.cpu.panels import (
    LANES,
    interleaved,
    round_up,
    to_panels,
    to_quantised_panels,
)
from worker_proc.cpu.program import Buffer, Format, Matrix, Op, OpKind
from worker_proc.models.layers import Embedding, HeadNorms, LayerNorm, Linear, RMSNorm, Rope
from worker_proc.models.ops import Ops

QUANTISED_GROUP_BYTES = GROUP + 8
"""Of a group of inputs: its numbers, a scale and a sum."""


class Weights:
    """Packed weights by the layer they belong to, and everything that the kernels point to.

    Packing a layer frees its own weight.
    """

    def __init__(self, bits: int | None = None) -> None:
        """bits: of a quantised weight, 8 or 4; None: the weights stay as they are, dense or packed
        in a file's blocks."""
        self._bits = bits
        self._matrices: dict[nn.Module, Matrix] = {}
        self._kept: list[Tensor] = []

    def matrix(self, layer: Linear | Embedding, gated: bool = False) -> Matrix:
        """gated: the layer makes gate and up."""
        if layer not in self._matrices:
            self._matrices[layer] = self._pack(layer, gated)
            del layer.weight
            layer.blocks = ()
        return self._matrices[layer]

    def floats(self, values: Tensor) -> int:
        """The address of a float32 copy."""
        return self.keep(values.detach().float().contiguous())

    def keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _pack(self, layer: Linear | Embedding, gated: bool) -> Matrix:
        groups = self._groups(layer)
        if groups is None:
            weight = interleaved(layer.weight) if gated else layer.weight
            panels, format, columns = to_panels(weight), Format.DENSE, len(weight)
            depth = panels.shape[1]
        else:
            groups = groups.by_rows(interleaved) if gated else groups
            panels, columns, depth = to_quantised_panels(groups), *groups.scale.shape
            format = Format.INT8 if groups.bits == 8 else Format.INT4
        return Matrix(
            format=format,
            panels=self.keep(panels),
            panel_units=panels.stride(0),
            bias=self._bias(layer, gated, panels.shape[0] * LANES),
            columns=columns,
            panel_count=panels.shape[0],
            depth=depth,
        )

    def _groups(self, layer: Linear | Embedding) -> Groups | None:
        """None: the weight is dense."""
        if layer.blocks:
            return as_stored(layer.blocks)
        return None if self._bits is None else rounded(layer.weight, self._bits)

    def _bias(self, layer: Linear | Embedding, gated: bool, length: int) -> int | None:
        """The address of a layer's bias, filled up with zeros."""
        bias = layer.bias if isinstance(layer, Linear) else None
        if bias is None:
            return None
        bias = interleaved(bias) if gated else bias
        filled = torch.zeros(length)
        filled[: len(bias)] = bias
        return self.floats(filled)


class Recorder(Ops[Buffer]):
    """The values of a model are buffers here.

    ops: what was recorded. widths: elements in a row of each buffer that is written.
    """

    def __init__(self, shape: AttentionShape, weights: Weights) -> None:
        self.ops: list[Op] = []
        self.widths: dict[Buffer, int] = {}
        self.rope: Rope | None = None
        self.position_vectors: Tensor | None = None
        self._shape = shape
        self._weights = weights

    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Buffer:
        width = tokens.weight.shape[1]
        if positions is not None:
            self.position_vectors = positions.weight
        return self._add(OpKind.EMBED, None, Buffer.RESIDUAL, width, self._weights.matrix(tokens))

    def norm(self, norm: LayerNorm | RMSNorm, x: Buffer) -> Buffer:
        kind = OpKind.LAYER_NORM if isinstance(norm, LayerNorm) else OpKind.RMS_NORM
        output = self._add(kind, x, Buffer.NORMED, len(norm.weight))
        op = self.ops[-1]
        op.gain, op.epsilon = self._weights.floats(norm.weight), norm.epsilon
        if isinstance(norm, LayerNorm):
            op.shift = self._weights.floats(norm.bias)
        return output

    def linear(self, proj: Linear, x: Buffer) -> Buffer:
        return self._multiply(OpKind.MATMUL, x, Buffer.PROJECTED, self._weights.matrix(proj))

    def linear_gelu(self, proj: Linear, x: Buffer) -> Buffer:
        return self._multiply(OpKind.MATMUL_GELU, x, Buffer.INNER, self._weights.matrix(proj))

    def linear_swiglu(self, proj: Linear, x: Buffer) -> Buffer:
        matrix = self._weights.matrix(proj, gated=True)
        return self._multiply(OpKind.MATMUL_SWIGLU, x, Buffer.INNER, matrix)

    def linear_add(self, residual: Buffer, proj: Linear, x: Buffer) -> Buffer:
        return self._multiply(OpKind.MATMUL_ADD, x, residual, self._weights.matrix(proj))

    def attend(
        self, layer: int, qkv: Buffer, rope: Rope | None, norms: HeadNorms | None = None
    ) -> Buffer:
        shape, self.rope = self._shape, rope
        stored = shape.heads * round_up(shape.head_dim, LANES)
        queries = self._add(OpKind.ROTATE_WRITE, qkv, Buffer.QUERIES, stored, layer=layer)
        if norms is not None:
            op = self.ops[-1]
            op.gain = self._weights.floats(norms.queries.weight)
            op.key_gain = self._weights.floats(norms.keys.weight)
            op.epsilon = norms.keys.epsilon
        width = shape.heads * shape.head_dim
        self._add(OpKind.ATTEND, queries, Buffer.ATTENDED, width, layer=layer)
        return self._add(OpKind.COMBINE, queries, Buffer.ATTENDED, width, layer=layer)

    def logits(self, head: Linear | Embedding, x: Buffer) -> Buffer:
        return self._multiply(OpKind.MATMUL, x, Buffer.LOGITS, self._weights.matrix(head))

    def _multiply(self, kind: OpKind, x: Buffer, output: Buffer, matrix: Matrix) -> Buffer:
        if matrix.format != Format.DENSE:
            x = self._add(OpKind.QUANTISE, x, Buffer.QUANTISED, matrix.depth)
        return self._add(kind, x, output, matrix.panel_count * LANES, matrix)

    def _add(
        self,
        kind: OpKind,
        x: Buffer | None,
        output: Buffer,
        width: int,
        matrix: Matrix | None = None,
        layer: int = 0,
    ) -> Buffer:
        op = Op(kind=kind, input=x or 0, output=output, layer=layer, width=width)
        if matrix is not None:
            op.matrix = matrix
        self.ops.append(op)
        if output == Buffer.QUANTISED:
            width = width * QUANTISED_GROUP_BYTES
        self.widths[output] = max(width, self.widths.get(output, 0))
        return output
