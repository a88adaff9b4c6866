"""The engine for a GPU: Triton kernels, and CUDA graphs of decode steps."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.gpu.experts import grouped_experts
from worker_proc.gpu.graphs import GREEDY, POSITION, SLOT, Capture, DecodeGraphs, DecodeOutput
from worker_proc.gpu.kernels.matmul import multiply
from worker_proc.gpu.kernels.rows import store_tokens
from worker_proc.gpu.ops import Hidden, TritonOps
from worker_proc.gpu.pages import AttentionMetadata, AttentionPlanner, Pages, TritonAttention
from worker_proc.models.base import Model
from worker_proc.sampling.sampler import argmax, draw
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.outputs import SampledTokens
from worker_proc.step.slot_table import SlotTable

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

PROGRESS_INTERVAL_S = 2.0


class TritonEngine(Engine):
    """A model on a GPU, with Triton's or FlashAttention's attention over its pages."""

    name = "triton"
    supports_jump_forward = False  # a row of several tokens keeps a step out of its graph
    supports_guesses = False  # for the same reason

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        kv_dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
        graph_sizes: Sequence[int] = (),
        capture: Capture | None = None,
        ranks: "TPGroup | None" = None,
        flash: bool = False,
    ) -> None:
        """Allocate the pages.

        Args:
            model: The model, on the device.
            num_pages: Size of the KV pool.
            page_size: Tokens of a page.
            kv_dtype: Of keys and values.
            device: The GPU.
            deterministic: A token's numbers are the same to the last bit, whatever else is in a
                step, and however a prompt is cut.
            graph_sizes: Rows of the decode steps to capture, ascending.
            capture: Captures a graph; None: none are.
            ranks: The processes with the other parts of the model.
            flash: Attend by FlashAttention-3, see flash.py.
        """
        self.model = model
        self._ranks = ranks
        self._experts = grouped_experts(model)
        self._multiply = multiply if deterministic else F.linear
        self._pages = Pages(model.attention_shape, num_pages, page_size, kv_dtype, device)
        self._attention: AttentionPlanner = TritonAttention(self._pages, deterministic)
        if flash:
            from worker_proc.gpu.flash import FlashAttention

            self._attention, self.name = FlashAttention(), "flash"
        self._graph_sizes, self._capture = graph_sizes, capture
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_graphs(self, table: SlotTable) -> None:
        if self._capture is None:
            return

        def decode(inputs: Tensor, drawing: bool) -> DecodeOutput:
            return self._decode(table, inputs, drawing)

        self._graphs = DecodeGraphs(
            decode, self._graph_sizes, table.device, self._capture, _progress_logger()
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        if (decoded := self._replay(inputs)) is not None:
            return decoded.hidden
        metadata = self._attention.plan_step(inputs)
        return self.model.forward(self._ops(metadata)).settled()

    def forward_and_sample(self, inputs: StepInputs) -> SampledTokens:
        unfiltered = inputs.table.sampling.unfiltered[inputs.sampled_slots].all()
        if unfiltered and (decoded := self._replay(inputs)) is not None:
            return SampledTokens(decoded.token_ids, stored=True)
        return super().forward_and_sample(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(self._ops(), Hidden(hidden)).x

    def _ops(self, metadata: AttentionMetadata | None = None) -> TritonOps:
        """Return the operations of a step; without metadata, those of `compute_logits`."""
        return TritonOps(self._pages, metadata, self._multiply, self._ranks, self._experts)

    def _replay(self, inputs: StepInputs) -> DecodeOutput | None:
        """Run a step as a graph; None if no graph was captured for such a step."""
        graphs, slots = self._graphs, inputs.layout.slots
        if graphs is None or not inputs.decodes_only or len(slots) > graphs.max_rows:
            return None
        greedy = inputs.table.sampling.greedy[slots].astype(np.int64)
        return graphs.run(slots, inputs.layout.num_computed, greedy)

    def _decode(self, table: SlotTable, inputs: Tensor, drawing: bool) -> DecodeOutput:
        """Decode and store a token of each row, without synchronising with the host.

        Args:
            table: The slots.
            inputs: `[3, rows]`, see graphs.py.
            drawing: Some rows are not greedy.
        """
        slots, positions = inputs[SLOT], inputs[POSITION]
        metadata = self._attention.plan_decode(table, slots, positions)
        ops = self._ops(metadata)
        hidden = self.model.forward(ops)
        logits = self.model.compute_logits(ops, hidden).x
        if drawing:
            existing = slots.clamp(min=0)
            token_ids = draw(
                logits,
                inputs[GREEDY] == 1,
                table.sampling.temperature[existing],
                table.sampling.seed[existing],
                positions + 1,
            )
        else:
            token_ids = argmax(logits)
        store_tokens(table.tokens, token_ids, slots, positions)
        return DecodeOutput(hidden.settled(), token_ids)


def _progress_logger() -> Callable[[int, int], None]:
    started_at = logged_at = time.monotonic()

    def log(num_done: int, num_graphs: int) -> None:
        nonlocal logged_at
        now = time.monotonic()
        if num_done == num_graphs or now - logged_at > PROGRESS_INTERVAL_S:
            logged_at = now
            logging.info(
                "captured %d of %d CUDA graphs in %.1f s", num_done, num_graphs, now - started_at
            )

    return log
