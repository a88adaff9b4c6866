"""Record a model as a program: the list of operations that the CPU kernels run."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from worker_proc.attention.base import AttentionShape, Ints
from worker_proc.cpu.program import Buffer, Format, Matrix, Op, OpKind, Program
from worker_proc.cpu.quantization import GROUP_SIZE
from worker_proc.cpu.weights import LANES, PackedWeights, round_up
from worker_proc.models.layers import Embedding, HeadNorms, LayerNorm, Linear, RMSNorm, Rope
from worker_proc.models.ops import Ops

# Formats whose inputs are multiplied as floats.
FLOAT_FORMATS = (Format.CODED_FLOAT8, Format.CODED_TABLE4)
QUANTISED_GROUP_BYTES = GROUP_SIZE + 8  # the codes of a group of inputs, a scale and a sum


class Recorder(Ops[Buffer]):
    """Records operations; the values of the model are the numbers of buffers.

    Attributes:
        ops: The operations recorded so far.
        widths: Elements in a row of each buffer that is written.
        position_tables: Addresses of the tables that positions are looked up in, by their fields in
            Program.
    """

    def __init__(self, shape: AttentionShape, weights: PackedWeights) -> None:
        self.ops: list[Op] = []
        self.widths: dict[Buffer, int] = {}
        self.position_tables: dict[str, int] = {}
        self._shape = shape
        self._weights = weights

    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Buffer:
        width = tokens.weight.shape[1]
        if positions is not None:
            self.position_tables["position_vectors"] = self._weights.keep_floats(positions.weight)
        return self._add(OpKind.EMBED, None, Buffer.RESIDUAL, width, self._weights.matrix(tokens))

    def norm(self, norm: LayerNorm | RMSNorm, x: Buffer) -> Buffer:
        kind = OpKind.LAYER_NORM if isinstance(norm, LayerNorm) else OpKind.RMS_NORM
        output = self._add(kind, x, Buffer.NORMED, len(norm.weight))
        op = self.ops[-1]
        op.gain, op.epsilon = self._weights.keep_floats(norm.weight), norm.epsilon
        if isinstance(norm, LayerNorm):
            op.shift = self._weights.keep_floats(norm.bias)
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
        shape = self._shape
        if rope is not None:
            self.position_tables["cosines"] = self._weights.keep_floats(rope.cosines)
            self.position_tables["sines"] = self._weights.keep_floats(rope.sines)
        padded_width = shape.heads * round_up(shape.head_dim, LANES)
        queries = self._add(OpKind.ROTATE_WRITE, qkv, Buffer.QUERIES, padded_width, layer=layer)
        if norms is not None:
            op = self.ops[-1]
            op.gain = self._weights.keep_floats(norms.queries.weight)
            op.key_gain = self._weights.keep_floats(norms.keys.weight)
            op.epsilon = norms.keys.epsilon
        width = shape.heads * shape.head_dim
        self._add(OpKind.ATTEND, queries, Buffer.ATTENDED, width, layer=layer)
        return self._add(OpKind.COMBINE, queries, Buffer.ATTENDED, width, layer=layer)

    def logits(self, head: Linear | Embedding, x: Buffer) -> Buffer:
        return self._multiply(OpKind.MATMUL, x, Buffer.LOGITS, self._weights.matrix(head))

    def _multiply(self, kind: OpKind, x: Buffer, output: Buffer, matrix: Matrix) -> Buffer:
        if matrix.order or matrix.format in FLOAT_FORMATS:
            x = self._add(OpKind.ARRANGE, x, Buffer.ARRANGED, matrix.depth * GROUP_SIZE, matrix)
        if matrix.format != Format.DENSE and matrix.format not in FLOAT_FORMATS:
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


@dataclass(slots=True)
class Recorded:
    """A recorded program.

    Attributes:
        program: The operations.
        widths: Elements in a row of each buffer that the program writes.
        room: Tokens that the buffers have room for.
    """

    program: Program
    widths: dict[Buffer, int]
    room: int = 0

    @classmethod
    def of(
        cls, ops: list[Op], widths: dict[Buffer, int], settings: dict[str, object]
    ) -> "Recorded":
        """Make a program of these operations. `settings`: the other fields of Program."""
        return cls(Program(op_count=len(ops), ops=(Op * len(ops))(*ops), **settings), widths)

    @property
    def ops(self) -> list[Op]:
        """The operations, which can be changed in place."""
        ops: list[Op] = self.program.ops[: self.program.op_count]
        return ops

    def compute_sampled_only(self) -> None:
        """Compute only sampled rows after the last layer's keys and values are written.

        Other rows are not needed by any token after that.
        """
        ops = self.ops
        writes = [i for i, op in enumerate(ops) if op.kind == OpKind.ROTATE_WRITE]
        for op in ops[writes[-1] + 1 :] if writes else ():
            op.sampled = True


class StepRows(NamedTuple):
    """The kernels' view of the rows of a step.

    Attributes:
        slots, computed, num_tokens: [rows], as in BatchLayout.
        argmax: [sampling rows], in which the kernels write the token of each.
    """

    slots: Ints
    computed: Ints
    num_tokens: Ints
    argmax: Ints

    @classmethod
    def of(cls, count: int) -> "StepRows":
        """Allocate arrays for `count` rows."""
        return cls(*np.empty((4, count), dtype=np.int64))
