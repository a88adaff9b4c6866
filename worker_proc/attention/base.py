"""The contract of an attention backend: it owns the KV pages, writes them and attends over them.

A page holds `page_size` consecutive tokens of one request, for every layer. How keys and values
lie within it is the backend's own business. Pages are numbered 0 to num_pages - 1; `num_pages`
itself is the number of one spare page, which fills the unused end of page table rows: nothing is
ever written there, and what a backend may gather from it must be masked.

Pages may be shared: the past of a row may lie in pages that another row of the same step fills (two
prompts with a common beginning that start together). So a backend writes every row's keys and
values of a layer before any row attends to it. A token is written by one row only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
INT8_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a model asks of attention. `heads` is a multiple of `kv_heads`: query head i uses
    key/value head i // (heads // kv_heads)."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Keys and values of one token in all layers. In int8 each head has a scale beside them."""
        scale = INT8_SCALE_BYTES if dtype == torch.int8 else 0
        return 2 * self.layers * self.kv_heads * (self.head_dim * dtype.itemsize + scale)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The rows of one step, in the order in which their tokens lie one after the other.

    Row i computes the tokens at positions computed[i] to computed[i] + num_tokens[i] - 1 of its
    request; each of them sees its whole past and itself. Rows come ordered so that similar ones
    are neighbours: by (num_tokens > 1, computed > 0, num_tokens, computed).

    page_table: [slots, max_pages] int64 on the device, the whole table.
    slots: [rows] which row of the page table; computed, num_tokens: [rows]; all three on the host.
    """

    page_table: Tensor
    slots: Ints
    computed: Ints
    num_tokens: Ints


class StepAttention(ABC):
    """Attention of one step: whatever does not differ between layers is already worked out."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Write all the step's keys and values of `layer` into the pages, then attend.

        q: [tokens, heads, head_dim]; kv: [tokens, 2, kv_heads, head_dim], keys then values, with
        positions already applied. Either may be strided in all but its last dimension. Scores are
        scaled by head_dim ** -0.5. Returns [tokens, heads * head_dim].
        """


class AttentionBackend(ABC):
    """Allocates the pages of all layers at construction."""

    shape: AttentionShape

    @abstractmethod
    def begin_step(self, rows: BatchLayout) -> StepAttention:
        """Indexes and masks for these rows, once for all layers."""
