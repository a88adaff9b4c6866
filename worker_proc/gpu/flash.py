"""Attention over pages by torch's `varlen_attn_out`, in place of our Triton kernel.

Of the kernels that torch can call for it, only those of FlashAttention-3 (Shah et al. 2024,
https://arxiv.org/abs/2407.08608) read page tables. They have to be installed beside torch, and run
on GPUs of compute capability 9.0.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn_out

from quadriga.errors import ConfigError
from worker_proc.gpu.pages import AttentionMetadata, AttentionPlanner, Launch
from worker_proc.models.base import Model
from worker_proc.models.layers import Attention
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import send_all


def activate() -> None:
    """Make torch call FlashAttention-3. Raises ConfigError if it is not installed."""
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"attention_backend flash needs FlashAttention-3 beside torch {torch.__version__}"
            f" ({error}); install it, or start with --attention-backend triton"
        ) from None


def check_attention(model: Model) -> None:
    """Raise ConfigError if a layer attends in a way that `varlen_attn_out` does not have."""
    for module in model.modules():
        if not isinstance(module, Attention):
            continue
        for asked, what in (
            (module.softcap is not None, f"an attention soft cap of {module.softcap}"),
            (module.sinks is not None, "attention sinks"),
        ):
            if asked:
                raise ConfigError(
                    f"attention_backend flash does not work with a model that has {what}: start"
                    " with --attention-backend triton"
                )


@dataclass(frozen=True, slots=True)
class FlashLaunch(Launch):
    """Attention of neighbouring rows.

    Attributes:
        starts: `[rows + 1]` int32: where each row begins among these tokens, and the end.
        lengths: `[rows]` int32: keys of each row.
        tables: `[rows, pages]` int32: its page table.
        max_queries, max_keys: Upper bounds for one row.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    max_queries: int
    max_keys: int

    def attend(self, q: Tensor, pool: Tensor, out: Tensor, attention: Attention) -> None:
        seen_before = -1 if attention.window is None else attention.window - 1
        varlen_attn_out(
            out.unflatten(1, q.shape[1:]),
            q,
            pool[0],
            pool[1],
            self.starts,
            None,
            self.max_queries,
            self.max_keys,
            scale=attention.scale,
            window_size=(seen_before, 0),  # the last query of a row is at its last key
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
        )


class FlashAttention(AttentionPlanner):
    """Launches rows of one token, which come first in a step, apart from prompts.

    FlashAttention chooses its blocks by the longest row of a launch.
    """

    def plan_step(self, inputs: StepInputs) -> AttentionMetadata:
        layout, table = inputs.layout, inputs.table
        starts = np.concatenate(([0], np.cumsum(layout.num_tokens)))
        lengths = layout.num_computed + layout.num_tokens
        slots, positions, row_slots, device_starts, device_lengths = send_all(
            table.device,
            inputs.token_slots,
            inputs.token_positions,
            layout.slots,
            starts,
            lengths,
        )
        tables = table.pages[row_slots].int()
        num_single = int((layout.num_tokens == 1).sum())
        launches: list[Launch] = []
        for begin, end in ((0, num_single), (num_single, len(layout.slots))):
            if begin < end:
                launches.append(
                    FlashLaunch(
                        int(starts[begin]),
                        int(starts[end]),
                        (device_starts[begin : end + 1] - device_starts[begin]).int(),
                        device_lengths[begin:end].int(),
                        tables[begin:end],
                        int(layout.num_tokens[begin:end].max()),
                        int(lengths[begin:end].max()),
                    )
                )
        return AttentionMetadata(table.tokens, table.pages, slots, positions, tuple(launches))

    def plan_decode(self, table: SlotTable, slots: Tensor, positions: Tensor) -> AttentionMetadata:
        rows = len(slots)
        launch = FlashLaunch(
            0,
            rows,
            torch.arange(rows + 1, device=slots.device, dtype=torch.int32),
            torch.where(slots < 0, 0, positions + 1).int(),
            table.pages[slots.clamp(min=0)].int(),
            1,
            table.context_length,
        )
        return AttentionMetadata(table.tokens, table.pages, slots, positions, (launch,))
