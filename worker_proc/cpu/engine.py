"""The engine of the CPU kernels: a model is recorded as a list of operations, run at each step."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quadriga.server.models.families.architectures import INT8_SCALE_BYTES
from quadriga.server.processes.machine import Cpus
from quadriga.wire.worker import DECODE, StepPlan
from worker_proc.adapters.change import Adapter
from worker_proc.cpu.adapters import PackedAdapter, pack_adapter
from worker_proc.cpu.build import fastest_compute_type, load_kernels
from worker_proc.cpu.memory import KVPools
from worker_proc.cpu.pack_store import PackStore
from worker_proc.cpu.program import (
    LANES,
    SAMPLING_ROW,
    Buffer,
    ComputeType,
    OpKind,
    Program,
    Slots,
    Step,
    check_heads,
    check_layout,
)
from worker_proc.cpu.recorder import MatrixPlace, Recorded, Recorder, StepRows
from worker_proc.cpu.weights import CodedWeights, round_up
from worker_proc.models.attention import Ints
from worker_proc.models.base import Model
from worker_proc.sampling.sampler import SamplingRows, argmax, uniform
from worker_proc.step.clock import RunningStep
from worker_proc.step.engine import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import EngineOutput, PendingStep, SampledTokens, add_nonfinite
from worker_proc.step.pooling import Classifier, OutputNorm
from worker_proc.step.slot_table import SlotTable, ints_of

# Scratch for rows whose context is split over threads: 8 MiB, touched as far as it is needed.
PART_FLOATS = 1 << 21
# Elements between the rows of a buffer: rows whose distance is a power of two would compete for
# the same sets of the cache.
STRIDE_EXTRA = 32
SOME_NOT_FINITE = 2  # what quadriga_decode returns where the logits of a row are not finite


class NativeEngine(Engine):
    """A model on a CPU, in float32 or bfloat16, with the residual stream in float32.

    The pages of a layer are one allocation, laid out as attention.h says. A token's numbers are the
    same to the last bit whatever else is in a step, and for any number of threads.

    Attributes:
        pools: the KV pages.
    """

    name = "native"
    has_equal_bits = True
    supports_adapters = True

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        threads: int,
        bits: int | None,
        int8_pages: bool,
        pools: KVPools | None = None,
        store: PackStore | None = None,
    ) -> None:
        """Record the model, which loses its weights and is of no further use.

        Args:
            model: the model, with its weights.
            num_pages: size of the KV pool.
            page_size: tokens of a page; a multiple of 16 with `int8_pages`.
            dtype: of the weights, unless they are quantized.
            threads: number of threads that compute a step.
            bits: bits of quantized weights; None: they stay in `dtype`.
            int8_pages: keep keys and values in 8 bits.
            pools: the KV pages of an engine with the same shape and dtype, to be shared.
            store: has the packed weights of an earlier worker, or takes these; None: neither.

        Raises:
            NoCompiler: the kernels cannot be compiled.
        """
        self._library = load_kernels()
        check_layout(self._library)
        check_heads(self._library, model.attention_shape)
        self._dtype = dtype
        self._numbers = fastest_compute_type(self._library, dtype)
        self._vocab_size = model.vocab_size
        pairs = self._numbers is ComputeType.BFLOAT16_PAIRS
        paired = pairs and bool(self._library.quadriga_paired_bfloat16())
        self._weights = CodedWeights(bits, store, paired)
        self.output_norm, self.has_head = OutputNorm.of(model), model.has_head
        self.classifier = Classifier.of(model)
        self._adapters: dict[int, PackedAdapter] = {}
        self._adapter_addresses = (ctypes.c_void_p * 0)()
        self._adapted_width = 0
        self._record(model, num_pages, page_size, int8_pages, pools)
        self._weights.close_store()
        self._weights.log_bytes()
        self._buffers: dict[Buffer, Tensor] = {}
        self._rows = StepRows.of(0)
        self._slots = Slots()
        self._table: SlotTable | None = None
        self._parts = torch.empty(PART_FLOATS)
        self._timed: list[tuple[Program, ctypes.Array[ctypes.c_float]]] | None = None
        self._step = Step(threads=threads, parts=self._parts.data_ptr(), part_floats=PART_FLOATS)

    @property
    def kernels(self) -> str:
        return f"{self.name} {Path(self._library._name).stem} {self._numbers.name.lower()}"

    def prefault_pages(self, cpus: Cpus) -> None:
        self.pools.start_prefaulting(cpus)

    def kv_parts(self) -> Sequence[Tensor]:
        return self.pools.layers

    def kv_numbers(self) -> Sequence[Tensor]:
        if not self._int8_panel_bytes:
            return [layer.view(self._dtype) for layer in self.pools.layers]
        panels = [layer.unflatten(1, (-1, self._int8_panel_bytes)) for layer in self.pools.layers]
        return [panel[..., -2 * LANES * INT8_SCALE_BYTES :].view(torch.float32) for panel in panels]

    def execute(self, plan: StepPlan, table: SlotTable, clock: RunningStep) -> PendingStep:
        decodes = plan.forward_mode == DECODE and not table.has_drafts
        if decodes and (decoded := self.decode(plan, table)) is not None:
            return PendingStep(lambda: decoded)
        return super().execute(plan, table, clock)

    def forward(self, inputs: StepInputs) -> Tensor:
        return self._forward(self._body, inputs, None)

    def forward_sampled(self, inputs: StepInputs) -> Tensor:
        """Compute the step; its last layer only of the rows that sample, `[samples, hidden]`."""
        return inputs.of_samples(self._forward(self._sampled_body, inputs, inputs.last_tokens))

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        if (
            not len(inputs.samples)
            or not inputs.table.sampling.greedy_only[inputs.sampled_slots].all()
        ):
            return self.sample_rows(inputs, self.forward_sampled(inputs))
        # Greedy rows are computed by a single run, so that the threads are woken only once.
        self._forward(self._whole, inputs, inputs.last_tokens)
        return SampledTokens(self._rows.argmax[: len(inputs.samples)])

    def decode(self, plan: StepPlan, table: SlotTable) -> EngineOutput | None:
        """Run a step from its plan to its tokens in one call of the kernels.

        Returns:
            What the step brought; None, with nothing changed, unless every row decodes one token
            greedily.
        """
        if len(plan.num_tokens) != len(plan.slots):
            return None
        count = len(plan.slots) // 4
        self._prepare(self._whole, count, count, count, table)
        token_ids = ctypes.create_string_buffer(4 * count)
        self._step.has_nonfinite = 0
        arguments = (ctypes.byref(self._slots), plan.slots, plan.num_tokens, token_ids)
        decoded = self._call(self._library.quadriga_decode, self._whole, count, None, *arguments)
        if not decoded:
            return None
        output = EngineOutput(token_ids.raw)
        if decoded == SOME_NOT_FINITE or self._step.has_nonfinite:
            slots = ints_of(plan.slots)
            rows = np.flatnonzero(ints_of(output.token_ids) < 0).tolist()
            broken = {row: int(table.num_known[slots[row]]) - 1 for row in rows}
            first, begins = table.nonfinite_from.numpy()[slots], table.num_computed[slots] - 1
            add_nonfinite(output, broken, np.arange(count), first, begins)
        return output

    def logits(self, hidden: Tensor, adapters: Ints | None = None) -> Tensor:
        step, count = self._step, len(hidden)
        self._reserve(self._head, count)
        of_slots = step.adapters
        step.row_count, step.adapters = 0, None  # nothing here attends
        if adapters is not None:  # as if row i were of slot i
            self._make_rows(count)
            self._rows.slots[:count], self._rows.computed[:count] = np.arange(count), 0
            self._rows.num_tokens[:count] = 1
            step.row_count, step.adapters = count, adapters.ctypes.data
        self._point(Buffer.RESIDUAL, hidden)
        self._call(self._library.quadriga_run, self._head, count, None)
        step.adapters = of_slots
        if (residual := self._buffers.get(Buffer.RESIDUAL)) is not None:
            self._point(Buffer.RESIDUAL, residual)
        return self._buffers[Buffer.LOGITS][: len(hidden), : self._vocab_size]

    def sample(self, logits: Tensor, rows: SamplingRows | None) -> Tensor:
        if rows is None:
            return argmax(logits)
        params = np.empty(len(logits), dtype=SAMPLING_ROW)
        params["temperature"] = torch.where(rows.greedy, 0.0, rows.temperature)
        params["top_p"], params["top_k"] = rows.top_p, rows.top_k
        params["min_p"] = 0.0 if rows.min_p is None else rows.min_p
        params["draw"] = uniform(rows.seed, rows.position)
        logits, tokens = logits.float(), torch.empty(len(logits), dtype=torch.int64)
        self._library.quadriga_sample(
            ctypes.c_void_p(tokens.data_ptr()),
            ctypes.c_void_p(logits.data_ptr()),
            *map(ctypes.c_int64, (logits.stride(0), logits.shape[1], len(logits))),
            ctypes.c_void_p(params.ctypes.data),
            ctypes.c_int64(self._step.threads),
        )
        return tokens

    def pack_adapter(self, adapter: Adapter) -> PackedAdapter:
        return pack_adapter(
            adapter, self._changeable, self._embedding, self._num_places, self._dtype
        )

    def set_adapter(self, index: int, adapter: Adapter | None) -> None:
        if adapter is None:
            packed = self._adapters.pop(index, None)
        else:
            packed = adapter if isinstance(adapter, PackedAdapter) else self.pack_adapter(adapter)
            self._adapters[index] = packed
            self._make_room_for_adapters(index + 1, packed.width)
        if index < len(self._adapter_addresses):
            held = self._adapters.get(index)
            address = None if held is None else ctypes.addressof(held.places)
            self._adapter_addresses[index] = address
        if self.draft is not None:
            self.draft.set_adapter(index, packed if adapter is not None else None)

    def _make_room_for_adapters(self, count: int, width: int) -> None:
        """Let steps have `count` adapters, of which a row has `width` elements at most."""
        if count > len(self._adapter_addresses):
            grown = (ctypes.c_void_p * count)(*self._adapter_addresses)
            self._adapter_addresses = grown
            for recorded in self._programs:
                recorded.program.adapter_count = count
                recorded.program.adapters = ctypes.addressof(grown)
        if width > self._adapted_width:
            self._adapted_width = width
            self._buffers.pop(Buffer.ADAPTED, None)
            for recorded in self._programs:
                recorded.widths[Buffer.ADAPTED], recorded.room = width, 0

    @property
    def _programs(self) -> tuple[Recorded, ...]:
        return self._body, self._head, self._sampled_body, self._whole

    @contextmanager
    def timed(self) -> Iterator[list[tuple[OpKind, float]]]:
        """Time every operation that runs inside of the `with` block.

        Yields:
            A list that holds afterwards, in order, each operation and the seconds that it took
            until the last thread was done with it.
        """
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

    def _record(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        int8_pages: bool,
        pools: KVPools | None,
    ) -> None:
        shape, weights = model.attention_shape, self._weights
        places = MatrixPlace.of_model(model)
        body, head = Recorder(shape, weights, places), Recorder(shape, weights, places)
        model.forward(body)
        if model.has_head:
            model.compute_logits(head, Buffer.RESIDUAL)
        self._changeable = body.changeable | head.changeable
        self._embedding, self._num_places = body.embedding, len(places)
        dim = round_up(shape.head_dim, LANES)
        row_bytes = dim + INT8_SCALE_BYTES if int8_pages else dim * self._dtype.itemsize
        page_bytes = page_size * 2 * shape.kv_heads * row_bytes
        self._int8_panel_bytes = 2 * LANES * row_bytes if int8_pages else 0
        self.pools = pools or KVPools(shape.num_pools, num_pages, page_bytes)
        layers = range(shape.layers)
        addresses = (self.pools.layers[layer % shape.num_pools].data_ptr() for layer in layers)
        settings = {
            "compute_type": self._numbers,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "padded_dim": dim,
            "page_size": page_size,
            "int8_pages": int8_pages,
            "pools": (ctypes.c_void_p * shape.layers)(*addresses),
            "position_vectors": body.position_vectors,
            "second_type": body.second_type,
            "bidirectional": shape.bidirectional,
        }
        self._body = Recorded.of(body.ops, body, settings)
        if not model.has_head:
            self._head = self._sampled_body = self._whole = self._body  # nothing is sampled
            return
        self._head = Recorded.of(head.ops, head, settings)
        self._sampled_body = Recorded.of(body.ops, body, settings)
        greedy = head.ops if head.ops[-1].kind == OpKind.MATMUL else head.ops[:-1]
        self._whole = Recorded.of(body.ops + greedy, body, settings)
        for recorded in (self._sampled_body, self._whole):
            recorded.compute_sampled_only()
        product = self._whole.ops[-1]
        product.kind, product.scale = OpKind.MATMUL_ARGMAX, 1.0
        if len(greedy) < len(head.ops):
            product.scale, product.softcap = head.ops[-1].scale, head.ops[-1].softcap

    def _forward(self, recorded: Recorded, inputs: StepInputs, sampled: Tensor | None) -> Tensor:
        """Run a step and return its hidden states `[tokens, hidden]`; `sampled` as in `_call`."""
        layout, tokens, count = inputs.layout, inputs.num_tokens, len(inputs.layout.slots)
        self._prepare(recorded, tokens, count, len(inputs.samples), inputs.table)
        # The kernels read copies, as passing the addresses of three arrays takes longer.
        self._rows.slots[:count] = layout.slots
        self._rows.computed[:count] = layout.num_computed
        self._rows.num_tokens[:count] = layout.num_tokens
        self._call(self._library.quadriga_run, recorded, tokens, sampled)
        return self._buffers[Buffer.RESIDUAL][:tokens, : recorded.widths[Buffer.RESIDUAL]]

    def _prepare(
        self, recorded: Recorded, tokens: int, rows: int, samples: int, table: SlotTable
    ) -> None:
        """Make room for a step of a table."""
        self._reserve(recorded, tokens)
        if table is not self._table:
            self._set_table(table)
        self.pools.reach(table.num_pages_used)
        self._make_rows(max(rows, samples))
        self._step.row_count = rows

    def _set_table(self, table: SlotTable) -> None:
        """Let the kernels read and write this table."""
        step, tokens, pages = self._step, table.tokens, table.pages
        step.tokens, step.token_stride = tokens.data_ptr(), tokens.stride(0)
        step.page_table, step.page_stride = pages.data_ptr(), pages.stride(0)
        step.nonfinite_from = table.nonfinite_from.data_ptr()
        step.second_from = table.second_from.ctypes.data
        step.adapters = table.adapters.ctypes.data
        sampling = table.sampling
        arrays = (table.num_known, table.num_computed, table.num_pages_of, sampling.greedy_only)
        self._slots = Slots(table.num_slots, *(values.ctypes.data for values in arrays))
        self._table = table

    def _make_rows(self, count: int) -> None:
        """Make room for the rows of a step."""
        if count > len(self._rows.slots):
            self._set_rows(StepRows.of(round_up(count, 64)))

    def _set_rows(self, rows: StepRows) -> None:
        """Let the kernels read and write these rows."""
        self._rows, step = rows, self._step
        step.slots, step.computed = rows.slots.ctypes.data, rows.computed.ctypes.data
        step.num_tokens, step.argmax = rows.num_tokens.ctypes.data, rows.argmax.ctypes.data

    def _reserve(self, recorded: Recorded, tokens: int) -> None:
        """Enlarge the buffers if necessary.

        They start as zeros, which the kernels read as padding beyond a row's width.
        """
        if tokens <= recorded.room:
            return
        recorded.room = round_up(tokens, 64)
        for buffer, width in recorded.widths.items():
            held = self._buffers.get(buffer)
            num_rows = recorded.room * recorded.rows_per_token.get(buffer, 1)
            if held is None or len(held) < num_rows:
                dtype = self._numbers.dtype_of(buffer)
                stride = round_up(width, LANES) + STRIDE_EXTRA
                self._buffers[buffer] = torch.zeros(num_rows, stride, dtype=dtype)
                self._point(buffer, self._buffers[buffer])

    def _point(self, buffer: Buffer, held: Tensor) -> None:
        self._step.buffers[buffer] = held.data_ptr()
        self._step.strides[buffer] = held.stride(0)

    def _call(
        self,
        run: Callable[..., int],
        recorded: Recorded,
        tokens: int,
        sampled: Tensor | None,
        *arguments: object,
    ) -> int:
        """Call a function of the library.

        Args:
            run: the function, which gets the program, the step and `arguments`.
            recorded: the program.
            tokens: number of tokens of the step.
            sampled: `[samples]` the sampled tokens of the step; None: all of them are.
            arguments: further arguments.
        """
        program, step = recorded.program, self._step
        step.token_count = tokens
        step.sampled = None if sampled is None else sampled.data_ptr()
        step.sampled_count = tokens if sampled is None else len(sampled)
        step.op_seconds, step.has_unknown_adapter = None, 0
        seconds = None
        if self._timed is not None:
            seconds = (ctypes.c_float * program.op_count)()
            step.op_seconds = ctypes.addressof(seconds)
        result = run(ctypes.byref(program), ctypes.byref(step), *arguments)
        if step.has_unknown_adapter:
            raise ValueError("a row has an adapter that is not loaded")
        if seconds is not None and self._timed is not None and seconds[0]:
            self._timed.append((program, seconds))
        return result
