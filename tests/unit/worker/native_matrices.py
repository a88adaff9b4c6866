"""Run single operations of the native kernels on one matrix."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from worker_proc.cpu.build import load_kernels
from worker_proc.cpu.engine import STRIDE_EXTRA
from worker_proc.cpu.program import Buffer, ComputeType, Format, Op, OpKind, Program, Step
from worker_proc.cpu.recorder import MatrixPlace, Recorder
from worker_proc.cpu.weights import PackedWeights, round_up
from worker_proc.models.attention import AttentionShape
from worker_proc.models.layers import Activation, Linear
from worker_proc.models.quantized_weights import PackedRows

NO_ATTENTION = AttentionShape(layers=1, heads=1, kv_heads=1, head_dim=16)


class NativeMatrix:
    """A layer with packed rows, multiplied and looked up by the kernels in float32."""

    def __init__(self, parts: list[PackedRows], gated: bool = False) -> None:
        """Pack the parts. `gated`: they are gate and up."""
        self.outputs = sum(part.shape[0] for part in parts)
        self.inputs = parts[0].shape[1]
        linear = Linear(self.inputs, self.outputs)
        linear.blocks = tuple(parts)
        place = MatrixPlace(0, self.outputs, self.inputs)
        self._weights = PackedWeights()  # keeps the panels
        self._recorder = Recorder(NO_ATTENTION, self._weights, {linear: place})
        if gated:
            self._recorder.linear_gated(linear, Buffer.NORMED, Activation.SILU)
        else:
            self._recorder.linear(linear, Buffer.NORMED)
        self.matrix = self._weights.matrix(linear)

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels, without the table of a mixed matrix."""
        if self.matrix.format == Format.MIXED:
            size = self.matrix.panel_count * 3
            table = (ctypes.c_int64 * size).from_address(self.matrix.mixed)
            return 4 * sum(table[2::3])
        return int(4 * self.matrix.panel_count * self.matrix.panel_units)

    def multiply(self, x: Tensor, threads: int = 1) -> Tensor:
        """Return x Wᵀ [rows, outputs], or silu(gate) * up."""
        buffers = {Buffer.NORMED: x.contiguous()}
        return self._run(self._recorder.ops, self._recorder.widths, buffers, len(x), threads)

    def look_up(self) -> Tensor:
        """Return all rows [outputs, inputs] as the embeddings of their numbers."""
        op = Op(kind=OpKind.EMBED, output=Buffer.RESIDUAL, width=self.inputs, scale=1.0)
        op.matrix = self.matrix
        widths = {Buffer.RESIDUAL: self.inputs}
        return self._run([op], widths, {}, self.outputs, 1)[:, : self.inputs]

    def _run(
        self,
        ops: list[Op],
        widths: dict[Buffer, int],
        buffers: dict[Buffer, Tensor],
        count: int,
        threads: int,
    ) -> Tensor:
        """Run operations on tokens 0, 1, ... and return the rows of the last one's output."""
        step = Step(threads=threads, token_count=count, row_count=1, sampled_count=count)
        for buffer, width in widths.items():
            dtype = torch.uint8 if buffer == Buffer.QUANTIZED else torch.float32
            buffers[buffer] = torch.zeros(count, round_up(width, 16) + STRIDE_EXTRA, dtype=dtype)
        for buffer, values in buffers.items():
            step.buffers[buffer] = values.data_ptr()
            step.strides[buffer] = values.stride(0)
        tokens = np.arange(count, dtype=np.int32)
        zero, num_tokens = np.zeros(1, dtype=np.int64), np.array([count])
        step.tokens, step.token_stride = tokens.ctypes.data, count
        step.slots = step.computed = zero.ctypes.data
        step.num_tokens = num_tokens.ctypes.data
        program = Program(
            compute_type=ComputeType.FLOAT32,
            op_count=len(ops),
            ops=(Op * len(ops))(*ops),
            heads=1,
            kv_heads=1,
            head_dim=16,
            padded_dim=16,
            page_size=16,
        )
        load_kernels().quadriga_run(ctypes.byref(program), ctypes.byref(step))
        return buffers[Buffer(ops[-1].output)]
