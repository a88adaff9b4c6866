"""Execute a model's operations on a GPU: torch multiplies matrices, Triton kernels do the rest."""

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

# x [rows, inputs], weight [outputs, inputs] and bias [outputs] or None to [rows, outputs].
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(slots=True)
class Hidden:
    """A value of the model.

    Attributes:
        x: [tokens, width].
        added: What is still to be added to `x`; the next norm adds it in its own kernel.
    """

    x: Tensor
    added: Tensor | None = None

    def settled(self) -> Tensor:
        """Return `x` with everything added."""
        if self.added is not None:
            self.x.add_(self.added)
            self.added = None
        return self.x


class TritonOps(Ops[Hidden]):
    """Keeps the residual stream in float32 and everything else in the dtype of the weights.

    Args:
        pages: The KV pages.
        metadata: Tokens, positions and pages of the step; None for `compute_logits` alone.
        multiply: The matrix product.
        tp_group: The ranks that have the other parts of the model, if there are several.
    """

    def __init__(
        self,
        pages: Pages,
        metadata: AttentionMetadata | None = None,
        multiply: Multiply = F.linear,
        tp_group: "TPGroup | None" = None,
    ) -> None:
        self._pages = pages
        self._metadata = metadata
        self._multiply = multiply
        self._tp_group = tp_group

    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Hidden:
        step = self._metadata
        assert step is not None
        return Hidden(embed(step.known, step.slots, step.positions, tokens, positions))

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
        if self._tp_group is not None and proj.parallel is Parallel.ROW:
            added = self._tp_group.all_reduce(added)
        return Hidden(residual.settled(), added)

    def attend(
        self, layer: int, qkv: Hidden, rope: Rope | None, norms: HeadNorms | None = None
    ) -> Hidden:
        assert self._metadata is not None
        heads = qkv.x.unflatten(1, (-1, self._pages.shape.head_dim))
        return Hidden(self._metadata.attend(self._pages.layers[layer], heads, rope, norms))

    def logits(self, head: Linear | Embedding, x: Hidden) -> Hidden:
        return Hidden(self._multiply(x.x, head.weight, None))
