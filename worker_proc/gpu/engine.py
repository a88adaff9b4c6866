"""The engine for a card."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.gpu.graphs import GREEDY, POSITION, SLOT, Capture, Decoded, DecodeGraphs
from worker_proc.gpu.kernels.matmul import multiply
from worker_proc.gpu.kernels.rows import note
from worker_proc.gpu.ops import Hidden, TritonOps
from worker_proc.gpu.pages import AttentionPlanner, Pages, TritonAttention
from worker_proc.models.base import Model
from worker_proc.sampling.sampler import argmax, draw
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import TokenIds

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

SECONDS_BETWEEN_LINES = 2.0
"""Of the progress of capturing."""


class TritonEngine(Engine):
    """deterministic: whatever else is in a step, and however a prompt is cut, a token's numbers are
    the same to the last bit. capture: None: no graphs, else of steps of so many rows. ranks: who
    has the other parts of the model. flash: attention by FlashAttention-3, see flash.py."""

    name = "triton"
    jumps = False
    """A row of several tokens keeps a step out of its graph."""

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
        self.model = model
        self._ranks = ranks
        self._multiply = multiply if deterministic else F.linear
        self._pages = Pages(model.attention_shape, num_pages, page_size, kv_dtype, device)
        self._attention: AttentionPlanner = TritonAttention(self._pages, deterministic)
        if flash:
            from worker_proc.gpu.flash import FlashAttention

            self._attention, self.name = FlashAttention(), "flash"
        self._graph_sizes, self._capture = graph_sizes, capture
        self._graphs: DecodeGraphs | None = None
        self._noted: Tensor | None = None

    @torch.inference_mode()
    def prepare(self, table: SlotTable) -> None:
        if self._capture is None:
            return

        def decode(inputs: Tensor, drawing: bool) -> Decoded:
            return self._decode(table, inputs, drawing)

        self._graphs = DecodeGraphs(
            decode, self._graph_sizes, table.device, self._capture, _teller()
        )

    def forward(self, inputs: StepInputs) -> Tensor:
        if (decoded := self._replay(inputs)) is not None:
            return decoded.hidden
        places = self._attention.of_step(inputs)
        return self.model.forward(
            TritonOps(self._pages, places, self._multiply, self._ranks)
        ).settled()

    def forward_argmax(self, inputs: StepInputs) -> TokenIds:
        return self.forward_sample(inputs)

    def forward_sample(self, inputs: StepInputs) -> TokenIds:
        if (decoded := self._replay(inputs)) is None:
            return super().forward_sample(inputs)
        self._noted = decoded.token_ids
        return decoded.token_ids

    def logits(self, hidden: Tensor) -> Tensor:
        ops = TritonOps(self._pages, multiply=self._multiply)
        return self.model.compute_logits(ops, Hidden(hidden)).x

    def argmax(self, hidden: Tensor) -> Tensor:
        return argmax(self.logits(hidden))

    def note(self, inputs: StepInputs, token_ids: TokenIds) -> None:
        """On the device a graph has noted what it chose itself."""
        if token_ids is self._noted:
            inputs.table.known[inputs.sampled_slots] = inputs.sample_positions + 1
        else:
            super().note(inputs, token_ids)

    def _replay(self, inputs: StepInputs) -> Decoded | None:
        """None where no graph is for this step."""
        graphs, slots = self._graphs, inputs.rows.slots
        if graphs is None or not inputs.decodes_only or not graphs.take(len(slots)):
            return None
        return graphs.run(
            slots, inputs.rows.computed, inputs.table.sampling.greedy[slots].astype(np.int64)
        )

    def _decode(self, table: SlotTable, inputs: Tensor, drawing: bool) -> Decoded:
        """A decode step that asks nothing of the host. inputs: [3, rows], see graphs.py."""
        slots, positions = inputs[SLOT], inputs[POSITION]
        places = self._attention.of_decode(table, slots, positions)
        ops = TritonOps(self._pages, places, self._multiply, self._ranks)
        hidden = self.model.forward(ops)
        logits = self.model.compute_logits(ops, hidden).x
        if drawing:
            real = slots.clamp(min=0)
            token_ids = draw(
                logits,
                inputs[GREEDY] == 1,
                table.sampling.temperature[real],
                table.sampling.seed[real],
                positions + 1,
            )
        else:
            token_ids = argmax(logits)
        note(table.tokens, token_ids, slots, positions)
        return Decoded(hidden.settled(), token_ids)


def _teller() -> Callable[[int, int], None]:
    began = told = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal told
        now = time.monotonic()
        if done == of or now - told > SECONDS_BETWEEN_LINES:
            told = now
            logging.info("captured %d of %d CUDA graphs in %.1f s", done, of, now - began)

    return tell
