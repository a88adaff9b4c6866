"""Attention over pages by torch's `varlen_attn_out`, in place of our own kernel.

Of the kernels that torch calls for it, those of FlashAttention-3 (Shah et al. 2024,
https://arxiv.org/abs/2407.08608) read page tables; its own do not. They have to be installed
beside it, and run on cards of compute capability 9.0.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn_out

from quadriga.errors import ConfigError
from worker_proc.gpu.pages import AttentionMetadata, AttentionPlanner, Launch
from worker_proc.step.inputs import StepInputs
from worker_proc.step.slot_table import SlotTable
from worker_proc.system.transfer import send_all

CAUSAL = (-1, 0)


def activate() -> None:
    """Make torch call FlashAttention-3. Raises ConfigError where it is not installed."""
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"attention_backend flash needs FlashAttention-3 beside torch {torch.__version__}"
            f" ({error}); install it, or start with --attention-backend triton"
        ) from None


@dataclass(frozen=True, slots=True)
class FlashLaunch(Launch):
    """Neighbouring rows. starts: [rows + 1] where each begins among these tokens, and the end;
    lengths: [rows] keys of each; tables: [rows, pages]; all three int32. most_queries, most_keys:
    of one row, or more than that."""

    starts: Tensor
    lengths: Tensor
    tables: Tensor
    most_queries: int
    most_keys: int

    def attend(self, q: Tensor, pool: Tensor, out: Tensor) -> None:
        varlen_attn_out(
            out.unflatten(1, q.shape[1:]),
            q,
            pool[0],
            pool[1],
            self.starts,
            None,
            self.most_queries,
            self.most_keys,
            window_size=CAUSAL,  # the last query of a row sees all of its keys
            enable_gqa=True,
            seqused_k=self.lengths,
            block_table=self.tables,
        )


class FlashAttention(AttentionPlanner):
    """Rows of one token, which come first in a step, are one launch, and prompts another: its
    kernels choose their blocks by the longest row."""

    def of_step(self, inputs: StepInputs) -> AttentionMetadata:
        rows, table = inputs.rows, inputs.table
        starts = np.concatenate(([0], np.cumsum(rows.num_tokens)))
        lengths = rows.computed + rows.num_tokens
        slots, positions, row_slots, starts_there, lengths_there = send_all(
            table.device,
            inputs.slot_of_token,
            inputs.position_of_token,
            rows.slots,
            starts,
            lengths,
        )
        tables = table.pages[row_slots].int()
        single = int((rows.num_tokens == 1).sum())
        launches: list[Launch] = []
        for begin, end in ((0, single), (single, len(rows.slots))):
            if begin < end:
                launches.append(
                    FlashLaunch(
                        int(starts[begin]),
                        int(starts[end]),
                        (starts_there[begin : end + 1] - starts_there[begin]).int(),
                        lengths_there[begin:end].int(),
                        tables[begin:end],
                        int(rows.num_tokens[begin:end].max()),
                        int(lengths[begin:end].max()),
                    )
                )
        return AttentionMetadata(table.tokens, table.pages, slots, positions, tuple(launches))

    def of_decode(self, table: SlotTable, slots: Tensor, positions: Tensor) -> AttentionMetadata:
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
