"""The engine of the native kernels: takes the model down as a list, and runs it at every step."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from quadriga.runtime.cpu_affinity import Cpus
from quadriga.wire.messages.worker import StepPlan
from worker_proc.attention.base import INT8_SCALE_BYTES, BatchLayout
from worker_proc.cpu.build import load_kernels
from worker_proc.cpu.memory import KVPools
from worker_proc.cpu.program import (
    SAMPLING_ROW,
    Buffer,
    ComputeType,
    OpKind,
    Program,
    Slots,
    Step,
    check_heads,
    check_layout,
    fastest_compute_type,
)
from worker_proc.cpu.recorder import Recorded, Recorder, StepRows
from worker_proc.cpu.weights import LANES, PackedWeights, round_up
from worker_proc.models.base import Model
from worker_proc.sampling.sampler import SamplingRows, argmax, uniform
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import TokenIds

PART_FLOATS = 1 << 18
"""Scratch for rows whose context is split over threads: a megabyte."""
STRIDE_EXTRA = 32
"""Rows of a buffer begin a little more than a multiple of 16 elements apart: rows that are a power
of two apart would fall into the same places of the cache."""
FLOAT_BUFFERS = (Buffer.RESIDUAL, Buffer.PROJECTED, Buffer.LOGITS)


class NativeEngine(Engine):
    """A model on a CPU, in float32 or bfloat16, with the residual stream in float32.

    The pages of a layer are one allocation, laid out as attention.h says. The model gives its
    weights away and is of no use afterwards.
    """

    name = "native"

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        threads: int,
        bits: int | None,
        int8_pages: bool,
        say: Callable[[str], None],
    ) -> None:
        """bits: of quantised weights, None where they stay in dtype. int8_pages: keep keys and
        values in 8 bits; page_size must be a multiple of 16 then. Raises NoCompiler where the
        kernels cannot be compiled."""
        self._library = load_kernels(say)
        check_layout(self._library)
        check_heads(self._library, model.attention_shape)
        self._dtype = dtype
        self._numbers = fastest_compute_type(self._library, dtype)
        if self._numbers is ComputeType.BFLOAT16:
            self._library.quadriga_vector_bits.restype = ctypes.c_int64
            say(
                "bfloat16 becomes float32 as it is multiplied, by vectors of"
                f" {self._library.quadriga_vector_bits()} bits: the fastest way on this CPU"
            )
        self._vocab_size = model.vocab_size
        self._weights = PackedWeights(bits)
        self._record(model, num_pages, page_size, int8_pages)
        self._buffers: dict[Buffer, Tensor] = {}
        self._rows = StepRows.of(0)
        self._slots = Slots()
        self._table: SlotTable | None = None
        self._parts = torch.empty(PART_FLOATS)
        self._timed: list[tuple[Program, ctypes.Array[ctypes.c_float]]] | None = None
        self._step = Step(threads=threads, parts=self._parts.data_ptr(), part_floats=PART_FLOATS)

    def take_memory_ahead(self, cpus: Cpus) -> None:
        self._pools.start_prefaulting(cpus)

    def forward(self, inputs: StepInputs) -> Tensor:
        self._forward(self._body, inputs, None)
        return self._hidden(self._body, inputs)

    def forward_sampled(self, inputs: StepInputs) -> Tensor:
        self._forward(self._sampled_body, inputs, inputs.last_tokens)
        return inputs.of_samples(self._hidden(self._sampled_body, inputs))

    def forward_argmax(self, inputs: StepInputs) -> TokenIds:
        """As a single run, so that the threads are woken but once."""
        self._forward(self._whole, inputs, inputs.last_tokens)
        return self._rows.argmax[: len(inputs.samples)]

    def decode(self, plan: StepPlan, table: SlotTable) -> bytes | None:
        if len(plan.num_tokens) != len(plan.slots):
            return None
        count = len(plan.slots) // 4
        self._prepare(self._whole, count, table)
        self._reserve_rows(count)
        self._step.row_count = count
        chosen = ctypes.create_string_buffer(4 * count)
        of_the_step = (ctypes.byref(self._slots), plan.slots, plan.num_tokens, chosen)
        took = self._call(self._library.quadriga_decode, self._whole, count, None, *of_the_step)
        return chosen.raw if took else None

    def logits(self, hidden: Tensor) -> Tensor:
        self._reserve(self._head, len(hidden))
        self._step.row_count = 0  # nothing here attends
        self._point(Buffer.RESIDUAL, hidden)
        self._run(self._head, len(hidden), None)
        if (residual := self._buffers.get(Buffer.RESIDUAL)) is not None:
            self._point(Buffer.RESIDUAL, residual)
        return self._buffers[Buffer.LOGITS][: len(hidden), : self._vocab_size]

    def argmax(self, hidden: Tensor) -> Tensor:
        return argmax(self.logits(hidden))

    def sample(self, logits: Tensor, rows: SamplingRows | None) -> Tensor:
        if rows is None:
            return argmax(logits)
        asked = np.empty(len(logits), dtype=SAMPLING_ROW)
        asked["temperature"] = torch.where(rows.greedy, 0.0, rows.temperature)
        asked["top_p"], asked["top_k"] = rows.top_p, rows.top_k
        asked["min_p"] = 0.0 if rows.min_p is None else rows.min_p
        asked["draw"] = uniform(rows.seed, rows.position)
        logits, tokens = logits.float(), torch.empty(len(logits), dtype=torch.int64)
        self._library.quadriga_sample(
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_void_p(logits.data_ptr()),
            *map(ctypes.c_int64, (logits.stride(0), logits.shape[1], len(logits))),
            ctypes.c_void_p(asked.ctypes.data),
            ctypes.c_int64(self._step.threads),
        )
        return tokens

    @contextmanager
    def timed(self) -> Iterator[list[tuple[OpKind, float]]]:
        """A list that holds afterwards, in their order, the operations of everything that ran
        inside, and the seconds that each took: on the first thread, until the last one was done."""
        operations: list[tuple[OpKind, float]] = []
        runs: list[tuple[Program, ctypes.Array[ctypes.c_float]]] = []
        self._timed = runs
        try:
            yield operations
        finally:
            self._timed = None
            for program, seconds in runs:
                kinds = (OpKind(op.kind) for op in program.ops[: program.op_count])
                operations += zip(kinds, seconds, strict=True)

    def _record(self, model: Model, num_pages: int, page_size: int, int8_pages: bool) -> None:
        shape, weights = model.attention_shape, self._weights
        body, head = Recorder(shape, weights), Recorder(shape, weights)
        model.forward(body)
        model.compute_logits(head, Buffer.RESIDUAL)
        dim = round_up(shape.head_dim, LANES)
        row_bytes = dim + INT8_SCALE_BYTES if int8_pages else dim * self._dtype.itemsize
        self._pools = KVPools(shape.layers, num_pages, page_size * 2 * shape.kv_heads * row_bytes)
        addresses = (layer.data_ptr() for layer in self._pools.layers)
        self._pool_list = (ctypes.c_void_p * shape.layers)(*addresses)
        settings = {
            "compute_type": self._numbers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "padded_dim": dim,
            "page_size": page_size,
            "int8_pages": int8_pages,
            "pools": self._pool_list,
        }
        if body.rope is not None:
            settings["cosines"] = weights.keep_floats(body.rope.cosines)
            settings["sines"] = weights.keep_floats(body.rope.sines)
        if body.position_vectors is not None:
            settings["position_vectors"] = weights.keep_floats(body.position_vectors)
        self._body, self._head = (Recorded.of(part, settings) for part in (body, head))
        self._sampled_body = Recorded.of(body, settings)
        self._whole = Recorded.from_ops(body.ops + head.ops, body.widths, settings)
        for recorded in (self._sampled_body, self._whole):
            recorded.compute_sampled_only()
        self._whole.ops[-1].kind = OpKind.MATMUL_ARGMAX

    def _forward(self, recorded: "Recorded", inputs: StepInputs, sampled: Tensor | None) -> None:
        """sampled: as in `_run`."""
        self._prepare(recorded, inputs.num_tokens, inputs.table)
        self._set_rows(inputs.rows)
        self._run(recorded, inputs.num_tokens, sampled)

    def _prepare(self, recorded: "Recorded", tokens: int, table: SlotTable) -> None:
        self._reserve(recorded, tokens)
        if table is not self._table:
            self._take(table)
        self._pools.reach(table.pages_reached)

    def _hidden(self, recorded: "Recorded", inputs: StepInputs) -> Tensor:
        """What `_forward` left: [tokens, hidden]."""
        width = recorded.widths[Buffer.RESIDUAL]
        return self._buffers[Buffer.RESIDUAL][: inputs.num_tokens, :width]

    def _take(self, table: SlotTable) -> None:
        """The steps that follow are of this table."""
        step, tokens, pages = self._step, table.tokens, table.pages
        step.tokens, step.token_stride = tokens.data_ptr(), tokens.stride(0)
        step.page_table, step.page_stride = pages.data_ptr(), pages.stride(0)
        of_slots = (table.known, table.computed, table.num_pages_of, table.sampling.greedy_only)
        self._slots = Slots(table.num_slots, *(values.ctypes.data for values in of_slots))
        self._table = table

    def _set_rows(self, rows: BatchLayout) -> None:
        """Copied to where the kernels look: asking arrays for their addresses takes longer."""
        count = len(rows.slots)
        self._reserve_rows(count)
        self._rows.slots[:count] = rows.slots
        self._rows.computed[:count] = rows.computed
        self._rows.num_tokens[:count] = rows.num_tokens
        self._step.row_count = count

    def _reserve_rows(self, count: int) -> None:
        if count > len(self._rows.slots):
            self._rows = mine = StepRows.of(round_up(count, 64))
            step = self._step
            step.slots, step.computed = mine.slots.ctypes.data, mine.computed.ctypes.data
            step.num_tokens, step.argmax = mine.num_tokens.ctypes.data, mine.argmax.ctypes.data

    def _reserve(self, recorded: "Recorded", tokens: int) -> None:
        """Make the buffers large enough. They start as zeros, which is what the kernels read
        beyond a row's width."""
        if tokens <= recorded.room:
            return
        recorded.room = round_up(tokens, 64)
        for buffer, width in recorded.widths.items():
            held = self._buffers.get(buffer)
            if held is None or len(held) < tokens:
                dtype = self._buffer_dtype(buffer)
                stride = round_up(width, LANES) + STRIDE_EXTRA
                self._buffers[buffer] = torch.zeros(recorded.room, stride, dtype=dtype)
                self._point(buffer, self._buffers[buffer])

    def _point(self, buffer: Buffer, held: Tensor) -> None:
        self._step.buffers[buffer] = held.data_ptr()
        self._step.strides[buffer] = held.stride(0)

    def _buffer_dtype(self, buffer: Buffer) -> torch.dtype:
        if buffer == Buffer.QUANTISED:
            return torch.uint8
        return torch.float32 if buffer in FLOAT_BUFFERS else self._numbers.passed

    def _run(self, recorded: "Recorded", tokens: int, sampled: Tensor | None) -> None:
        """sampled: where the sampled tokens are in the step; None: all of them are."""
        self._call(self._library.quadriga_run, recorded, tokens, sampled)

    def _call(
        self,
        run: Callable[..., int],
        recorded: "Recorded",
        tokens: int,
        sampled: Tensor | None,
        *more: object,
    ) -> int:
        """What the library's function says. sampled: as in `_run`; more: what it is given besides
        program and step."""
        program, step = recorded.program, self._step
        step.token_count = tokens
        step.sampled = None if sampled is None else sampled.data_ptr()
        step.sampled_count = tokens if sampled is None else len(sampled)
        step.op_seconds = None
        if self._timed is None:
            return run(ctypes.byref(program), ctypes.byref(step), *more)
        seconds = (ctypes.c_float * program.op_count)()
        step.op_seconds = ctypes.addressof(seconds)
        said = run(ctypes.byref(program), ctypes.byref(step), *more)
        if seconds[0]:
            self._timed.append((program, seconds))
        return said
