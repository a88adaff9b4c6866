"""What a model asks of attention, and the rows of a step that it is asked for.

Every engine has its own attention over its own pages: plain torch (engines/torch_engine.py), the
GPU (gpu/pages.py) and the CPU kernels (cpu/csrc/attention.h). They have these rules in common:

- A page holds `page_size` consecutive tokens of one request, for every layer. How keys and values
  lie within a page is up to the engine.
- Pages are numbered 0 to num_pages - 1. `num_pages` is the number of one spare page, which pads
  the rows of page tables: it is never written to, and what is gathered from it must be masked.
- Pages may be shared: the past of a row may lie in pages that another row of the same step fills
  (two prompts with a common prefix that start together). So every row's keys and values of a
  layer are written before any row attends. A token is written by one row only.
- Scale, soft cap, window and sinks are those of the layer (`Attention` of models/layers.py). Keys
  before the window of a row's first query are not read: their pages may be those of others.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.server.models.families.architectures import kv_bytes_per_token

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Number and size of a model's heads, and what a token sees.

    `heads` is a multiple of `kv_heads`: query head i uses key/value head
    i // (heads // kv_heads).

    Attributes:
        bidirectional: a token sees all tokens of its row, which one step computes as a whole;
            otherwise itself and its past.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bidirectional: bool = False

    @property
    def num_pools(self) -> int:
        """Number of layers with pages of their own: without a past, all layers share one's."""
        return 1 if self.bidirectional else self.layers

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values in all layers.

        In int8 each head has a scale beside them.
        """
        return kv_bytes_per_token(
            self.num_pools, self.kv_heads, self.head_dim, dtype.itemsize, dtype == torch.int8
        )


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The rows of one step, in the order in which their tokens lie one after the other.

    Row i computes the tokens at positions num_computed[i] to num_computed[i] + num_tokens[i] - 1
    of its request; each of them sees its whole past and itself. Rows are ordered so that similar
    ones are neighbours: by (num_tokens > 1, num_computed > 0, num_tokens, num_computed).

    Attributes:
        page_table: `[slots, max_pages]` int64 on the device, of all slots.
        slots: `[rows]` on the host: the row's row of the page table.
        num_computed: `[rows]` on the host: tokens in the pages before the step.
        num_tokens: `[rows]` on the host: tokens that the step computes.
    """

    page_table: Tensor
    slots: Ints
    num_computed: Ints
    num_tokens: Ints
