"""Record a model as a program: the list of operations that the CPU kernels run."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ModelError
from worker_proc.cpu.adapters import ChangeableMatrix
from worker_proc.cpu.program import LANES, NO_PLACE, Buffer, Format, Matrix, Op, OpKind, Program
from worker_proc.cpu.weights import GROUP_SIZE, PackedWeights, round_up
from worker_proc.models.attention import AttentionShape, Ints
from worker_proc.models.base import Model
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    RMSNorm,
)
from worker_proc.models.ops import Ops
from worker_proc.models.position_bias import PositionBias

# In the order of program.h.
ACTIVATIONS = (
    Activation.SILU,
    Activation.GELU_TANH,
    Activation.GELU,
    Activation.RELU,
    Activation.CLAMPED_SWIGLU,
)
# Formats whose inputs are multiplied as floats.
FLOAT_FORMATS = (Format.CODED_FLOAT8, Format.CODED_TABLE4)
EXPERT_BUFFERS = (
    Buffer.EXPERT_INPUT,
    Buffer.EXPERT_QUANTIZED,
    Buffer.EXPERT_INNER,
    Buffer.EXPERT_OUTPUT,
    Buffer.ADAPTED,
)
QUANTIZED_GROUP_BYTES = GROUP_SIZE + 12  # the codes of a group of inputs, a scale and two sums


class MatrixPlace(NamedTuple):
    """Number and size of a matrix, of which adapters change the rows."""

    number: int
    outputs: int
    inputs: int

    @classmethod
    def of_model(cls, model: Model) -> "dict[Linear | Embedding, MatrixPlace]":
        """Return the place of each matrix of a model, before its weights are taken."""
        return {
            matrix: cls(number, *matrix.weight.shape)
            for number, matrix in enumerate(model.matrices())
        }


class Recorder(Ops[Buffer]):
    """Records operations; the values of the model are the numbers of buffers.

    Attributes:
        ops: the operations recorded so far.
        widths: elements in a row of each buffer that is written.
        rows_per_token: rows of each buffer for a token; missing: one.
        changeable: the matrices that adapters can change, by their numbers.
        embedding: the number of the table of the tokens' embeddings.
        position_vectors: address of the embeddings of positions, or None.
        second_type: address of what is added to tokens of the second type, or None.
    """

    def __init__(
        self,
        shape: AttentionShape,
        weights: PackedWeights,
        places: Mapping[Linear | Embedding, "MatrixPlace"],
    ) -> None:
        """Record nothing yet.

        Args:
            shape: of the attention.
            weights: take the weights of the layers.
            places: of the matrices in adapters.
        """
        self.changeable: dict[int, ChangeableMatrix] = {}
        self.embedding = NO_PLACE
        self._places = places
        self.ops: list[Op] = []
        self.widths: dict[Buffer, int] = {}
        self.rows_per_token: dict[Buffer, int] = {}
        self.position_vectors: int | None = None
        self.second_type: int | None = None
        self._shape = shape
        self._weights = weights
        self._position_biases: dict[PositionBias, int] = {}  # addresses

    def embed(
        self,
        tokens: Embedding,
        positions: Embedding | None = None,
        scale: float = 1.0,
        second_type: Tensor | None = None,
    ) -> Buffer:
        width = tokens.weight.shape[1]
        if positions is not None:
            vectors = positions.weight[positions.first_row :]
            self.position_vectors = self._weights.keep_floats(vectors)
        if second_type is not None:
            self.second_type = self._weights.keep_floats(second_type)
        matrix = self._weights.matrix(tokens)
        output = self._add(OpKind.EMBED, None, Buffer.RESIDUAL, width, matrix)
        self.embedding = self._places[tokens].number
        self.ops[-1].scale, self.ops[-1].place = scale, self.embedding
        return output

    def norm(self, norm: LayerNorm | RMSNorm, x: Buffer) -> Buffer:
        if isinstance(norm, RMSNorm):
            return self._normalize(OpKind.RMS_NORM, norm, x, Buffer.NORMED)
        output = self._add(OpKind.LAYER_NORM, x, Buffer.NORMED, len(norm.weight))
        op = self.ops[-1]
        op.gain, op.epsilon = self._weights.keep_floats(norm.weight), norm.epsilon
        op.shift = self._weights.keep_floats(norm.bias)
        return output

    def norm_residual(self, norm: LayerNorm | RMSNorm, residual: Buffer) -> Buffer:
        self.norm(norm, residual)
        self.ops[-1].output = residual
        return residual

    def norm_add(self, residual: Buffer, norm: RMSNorm, x: Buffer) -> Buffer:
        return self._normalize(OpKind.NORM_ADD, norm, x, residual)

    def linear(self, proj: Linear, x: Buffer) -> Buffer:
        return self._project(OpKind.MATMUL, x, Buffer.PROJECTED, proj)

    def linear_activation(self, proj: Linear, x: Buffer, activation: Activation) -> Buffer:
        output = self._project(OpKind.MATMUL_ACTIVATE, x, Buffer.INNER, proj)
        self.ops[-1].activation = ACTIVATIONS.index(activation)
        return output

    def linear_gated(self, proj: Linear, x: Buffer, activation: Activation) -> Buffer:
        output = self._project(OpKind.MATMUL_GATE, x, Buffer.INNER, proj)
        self.ops[-1].activation = ACTIVATIONS.index(activation)
        return output

    def linear_add(self, residual: Buffer, proj: Linear, x: Buffer, scale: float = 1.0) -> Buffer:
        output = self._project(OpKind.MATMUL_ADD, x, residual, proj)
        self.ops[-1].scale = scale
        return output

    def experts_add(
        self, residual: Buffer, experts: Experts, x: Buffer, scale: float = 1.0
    ) -> Buffer:
        gate_up = self._weights.matrices(experts.gate_up, gated=True)
        down = self._weights.matrices(experts.down)
        begin, hidden_size = len(self.ops), down[0].columns
        scores = self._project(OpKind.MATMUL, x, Buffer.PROJECTED, experts.router, exact=True)
        for kind in (OpKind.ROUTE, OpKind.SORT_ROWS):
            self._add(kind, scores, scores, len(gate_up))
            self.ops[-1].expert_count = len(gate_up)
            self.ops[-1].renormalize = experts.renormalize
        x = self._not_residual(x)
        place = self._adapt_experts(experts.gate_up, x, gated=True)
        gathered = self._gather(x, hidden_size, gate_up[0])
        inner = self._by_expert(OpKind.MATMUL_GATE, gathered, Buffer.EXPERT_INNER, gate_up)
        self.ops[-1].activation, self.ops[-1].place = ACTIVATIONS.index(experts.activation), place
        place = self._adapt_experts(experts.down, inner)
        if down[0].format != Format.DENSE:
            inner = self._add(OpKind.QUANTIZE, inner, Buffer.EXPERT_QUANTIZED, down[0].depth)
            self.ops[-1].by_expert = True
        outputs = self._by_expert(OpKind.MATMUL, inner, Buffer.EXPERT_OUTPUT, down)
        self.ops[-1].place = place
        self._add(OpKind.ADD_EXPERTS, outputs, residual, hidden_size)
        self.ops[-1].scale = scale
        for op in self.ops[begin:]:
            op.num_chosen = experts.num_chosen
        for buffer in EXPERT_BUFFERS:
            self.rows_per_token[buffer] = experts.num_chosen
        return residual

    def attend(self, layer: int, qkv: Buffer, attention: Attention) -> Buffer:
        shape, keep = self._shape, self._weights.keep_floats
        padded_width = shape.heads * round_up(shape.head_dim, LANES)
        queries = self._add(OpKind.ROTATE_WRITE, qkv, Buffer.QUERIES, padded_width, layer=layer)
        op = self.ops[-1]
        op.scale = attention.scale
        if (rope := attention.rope) is not None:
            op.cosines, op.sines = keep(rope.cosines), keep(rope.sines)
            op.rotated = 2 * rope.cosines.shape[1]
        if (norms := attention.norms) is not None:
            op.gain, op.key_gain = keep(norms.queries.gain), keep(norms.keys.gain)
            op.epsilon, op.norm_whole = norms.keys.epsilon, norms.whole
        sinks = None if attention.sinks is None else keep(attention.sinks)
        width = shape.heads * shape.head_dim
        for kind in (OpKind.ATTEND, OpKind.COMBINE):
            self._add(kind, queries, Buffer.ATTENDED, width, layer=layer)
            op = self.ops[-1]
            op.window, op.softcap = attention.window or 0, attention.softcap or 0.0
            op.sinks = sinks
            if attention.position_bias is not None:
                op.position_bias, op.bias_stride = self._position_bias(attention.position_bias)
        return Buffer.ATTENDED

    def _position_bias(self, bias: PositionBias) -> tuple[int, int]:
        """Return the address of the first head's bias of distance 0, and the heads' stride.

        The kernels read whole vectors, and so up to 15 columns more than there are.
        """
        if bias not in self._position_biases:
            self._position_biases[bias] = self._weights.keep_floats(F.pad(bias.values, (0, LANES)))
        first = self._position_biases[bias] + bias.own_column * bias.values.itemsize
        return first, bias.values.shape[1] + LANES

    def logits(
        self,
        head: Linear | Embedding,
        x: Buffer,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Buffer:
        output = self._project(OpKind.MATMUL, x, Buffer.LOGITS, head)
        if scale != 1.0 or softcap is not None:
            self._add(OpKind.SCALE_CAP, output, output, self.ops[-1].width)
            self.ops[-1].scale, self.ops[-1].softcap = scale, softcap or 0.0
        return output

    def _normalize(self, kind: OpKind, norm: RMSNorm, x: Buffer, output: Buffer) -> Buffer:
        self._add(kind, x, output, len(norm.weight))
        op = self.ops[-1]
        op.gain, op.epsilon = self._weights.keep_floats(norm.gain), norm.epsilon
        return output

    def _gather(self, x: Buffer, hidden_size: int, matrix: Matrix) -> Buffer:
        """Copy the inputs of each token to the rows of its experts, as `matrix` reads them.

        Raises:
            ModelError: the matrix needs inputs that experts do not get.
        """
        if matrix.order or matrix.format in FLOAT_FORMATS:
            raise ModelError(
                "the native kernels multiply no experts in this quantized format; start with"
                " --attention-backend torch"
            )
        output, width = Buffer.EXPERT_INPUT, hidden_size
        if matrix.format != Format.DENSE:
            x = self._add(OpKind.QUANTIZE, x, Buffer.QUANTIZED, matrix.depth)
            output, width = Buffer.EXPERT_QUANTIZED, matrix.depth * QUANTIZED_GROUP_BYTES
        self._add(OpKind.GATHER, x, output, width)
        self.ops[-1].by_expert = True
        return output

    def _adapt_experts(self, projections: nn.ModuleList, x: Buffer, gated: bool = False) -> int:
        """Compute what adapters multiply for each expert's rows; return the first one's place."""
        numbers = []
        for projection in projections:
            assert isinstance(projection, Linear)
            number, outputs, inputs = self._places[projection]
            self.changeable[number] = ChangeableMatrix(inputs, outputs, gated)
            numbers.append(number)
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        self._add(OpKind.ADAPT, x, Buffer.ADAPTED, inputs)
        self.ops[-1].place, self.ops[-1].by_expert = numbers[0], True
        return numbers[0]

    def _by_expert(
        self, kind: OpKind, x: Buffer, output: Buffer, matrices: "ctypes.Array[Matrix]"
    ) -> Buffer:
        """Multiply the rows of each expert by its matrix."""
        self._add(kind, x, output, matrices[0].panel_count * LANES)
        self.ops[-1].experts, self.ops[-1].by_expert = ctypes.addressof(matrices), True
        return output

    def _not_residual(self, x: Buffer) -> Buffer:
        """Return a buffer with a row for each token that is computed."""
        if x != Buffer.RESIDUAL:
            return x
        return self._add(OpKind.COPY, x, Buffer.NORMED, self.widths[Buffer.RESIDUAL])

    def _project(
        self,
        kind: OpKind,
        x: Buffer,
        output: Buffer,
        layer: Linear | Embedding,
        exact: bool = False,
    ) -> Buffer:
        """Multiply by the weight of a layer, which adapters can change."""
        gated = kind == OpKind.MATMUL_GATE
        number, outputs, inputs = self._places[layer]
        matrix = self._weights.matrix(layer, gated, exact)
        self.changeable[number] = ChangeableMatrix(inputs, outputs, gated)
        x = self._not_residual(x)
        self._add(OpKind.ADAPT, x, Buffer.ADAPTED, inputs)
        self.ops[-1].place = number
        if matrix.order or matrix.format in FLOAT_FORMATS:
            x = self._add(OpKind.ARRANGE, x, Buffer.ARRANGED, matrix.depth * GROUP_SIZE, matrix)
        if matrix.format != Format.DENSE and matrix.format not in FLOAT_FORMATS:
            x = self._add(OpKind.QUANTIZE, x, Buffer.QUANTIZED, matrix.depth)
        self._add(kind, x, output, matrix.panel_count * LANES, matrix)
        self.ops[-1].place = number
        return output

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
        op.place = NO_PLACE
        if matrix is not None:
            op.matrix = matrix
        self.ops.append(op)
        if kind == OpKind.QUANTIZE:
            width = width * QUANTIZED_GROUP_BYTES
        if kind != OpKind.ADAPT:  # whose output has the ranks of the adapters that there are
            self.widths[output] = max(width, self.widths.get(output, 0))
        return output


@dataclass(slots=True)
class Recorded:
    """A recorded program.

    Attributes:
        program: the operations.
        widths: elements in a row of each buffer that the program writes.
        rows_per_token: rows of each buffer for a token; missing: one.
        room: tokens that the buffers have room for.
    """

    program: Program
    widths: dict[Buffer, int]
    rows_per_token: dict[Buffer, int] = field(default_factory=dict)
    room: int = 0

    @classmethod
    def of(cls, ops: list[Op], recorder: Recorder, settings: dict[str, object]) -> "Recorded":
        """Make a program of operations.

        Args:
            ops: the operations.
            recorder: the recorder of the buffers' sizes.
            settings: the other fields of Program.
        """
        program = Program(op_count=len(ops), ops=(Op * len(ops))(*ops), **settings)
        return cls(program, recorder.widths, recorder.rows_per_token)

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
