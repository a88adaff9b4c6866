"""A model's operations on a card: torch's matrix products, and Triton kernels for the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from worker_proc.gpu.kernels.rows import add_and_norm, embed, gelu_, swiglu
from worker_proc.gpu.pages import AttentionMetadata, Pages
from worker_proc.models.layers import (
    Embedding,
    HeadNorms,
    LayerNorm,
    Linear,
    Parallel,
    RMSNorm,
    Rope,
)
from worker_proc.models.ops import Ops

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [rows, inputs], weight [outputs, inputs] and bias to [rows, outputs]."""


@dataclass(slots=True)
class Hidden:
    """A value of the model. added: what is still to be added to a residual stream `x`, which the
    next norm does on its way."""

    x: Tensor
    added: Tensor | None = None

    def settled(self) -> Tensor:
        """[rows, hidden], with everything added."""
        if self.added is not None:
            self.x.add_(self.added)
            self.added = None
        return self.x


class TritonOps(Ops[Hidden]):
    """The residual stream is in float32, everything else in the dtype of the weights.

    places: None where nothing is asked that depends on tokens, positions or pages. ranks: who has
    the other parts of the model.
    """

    def __init__(
        self,
        pages: Pages,
        places: AttentionMetadata | None = None,
        multiply: Multiply = F.linear,
        ranks: "TPGroup | None" = None,
    ) -> None:
        self._ranks = ranks
        self._pages = pages
        self._places = places
        self._multiply = multiply

    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Hidden:
        places = self._places
        assert places is not None
        return Hidden(embed(places.known, places.slots, places.positions, tokens, positions))

    def norm(self, norm: LayerNorm | RMSNorm, x: Hidden) -> Hidden:
        added, x.added = x.added, None
        return Hidden(add_and_norm(x.x, added, norm))

    def linear(self, proj: Linear, x: Hidden) -> Hidden:
        return Hidden(self._multiply(x.x, proj.weight, proj.bias))

    def linear_gelu(self, proj: Linear, x: Hidden) -> Hidden:
        return Hidden(gelu_(self.linear(proj, x).x))

    def linear_swiglu(self, proj: Linear, x: Hidden) -> Hidden:
        return Hidden(swiglu(self.linear(proj, x).x))

    def linear_add(self, residual: Hidden, proj: Linear, x: Hidden) -> Hidden:
        added = self.linear(proj, x).x
        if self._ranks is not None and proj.split is Parallel.INPUTS:
            added = self._ranks.all_reduce(added)
        return Hidden(residual.settled(), added)

    def attend(
        self, layer: int, qkv: Hidden, rope: Rope | None, norms: HeadNorms | None = None
    ) -> Hidden:
        assert self._places is not None
        heads = qkv.x.unflatten(1, (-1, self._pages.shape.head_dim))
        return Hidden(self._places.attend(self._pages.layers[layer], heads, rope, norms))

    def logits(self, head: Linear | Embedding, x: Hidden) -> Hidden:
        return Hidden(self._multiply(x.x, head.weight, None))
