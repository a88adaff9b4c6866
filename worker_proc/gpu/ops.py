"""Execute a model's operations on a GPU: torch multiplies matrices, Triton kernels do the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.gpu.kernels.activations import activate_, gate_up
from worker_proc.gpu.kernels.rows import add_and_norm, embed, norm_and_add
from worker_proc.gpu.pages import AttentionMetadata, Pages
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    Parallel,
    RMSNorm,
)
from worker_proc.models.ops import Ops
from worker_proc.models.torch_functions import cap

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
        factor: Of `added`.
    """

    x: Tensor
    added: Tensor | None = None
    factor: float = 1.0

    def settled(self) -> Tensor:
        """Return `x` with everything added."""
        if self.added is not None:
            self.x.add_(self.added, alpha=self.factor)
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

    def embed(
        self, tokens: Embedding, positions: Embedding | None = None, scale: float = 1.0
    ) -> Hidden:
        step = self._metadata
        assert step is not None
        return Hidden(embed(step.known, step.slots, step.positions, tokens, positions, scale))

    def norm(self, norm: LayerNorm | RMSNorm, x: Hidden) -> Hidden:
        added, x.added = x.added, None
        return Hidden(add_and_norm(x.x, added, norm, x.factor))

    def norm_add(self, residual: Hidden, norm: RMSNorm, x: Hidden) -> Hidden:
        norm_and_add(residual.settled(), norm, x.x)
        return residual

    def linear(self, proj: Linear, x: Hidden) -> Hidden:
        rows = x.settled().to(proj.weight.dtype)  # which the residual stream does not have
        projected = self._multiply(rows, proj.weight, proj.bias)
        if self._tp_group is not None and proj.parallel is Parallel.ROW:
            projected = self._tp_group.all_reduce(projected)
        return Hidden(projected)

    def linear_activation(self, proj: Linear, x: Hidden, activation: Activation) -> Hidden:
        return Hidden(activate_(self.linear(proj, x).x, activation))

    def linear_gated(self, proj: Linear, x: Hidden, activation: Activation) -> Hidden:
        return Hidden(gate_up(self.linear(proj, x).x, activation))

    def linear_add(self, residual: Hidden, proj: Linear, x: Hidden, scale: float = 1.0) -> Hidden:
        return Hidden(residual.settled(), self.linear(proj, x).x, scale)

    def experts_add(
        self,
        residual: Hidden,  # noqa: ARG002
        experts: Experts,  # noqa: ARG002
        x: Hidden,  # noqa: ARG002
        scale: float = 1.0,  # noqa: ARG002
    ) -> Hidden:
        raise _missing("a mixture of experts")

    def attend(self, layer: int, qkv: Hidden, attention: Attention) -> Hidden:
        assert self._metadata is not None
        heads = qkv.x.unflatten(1, (-1, self._pages.shape.head_dim))
        return Hidden(self._metadata.attend(self._pages.layers[layer], heads, attention))

    def logits(
        self,
        head: Linear | Embedding,
        x: Hidden,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Hidden:
        logits = self._multiply(x.x, head.weight, head.bias if isinstance(head, Linear) else None)
        return Hidden(cap(logits if scale == 1.0 else logits * scale, softcap))


def _missing(what: str) -> ModelError:
    return ModelError(
        f"the GPU kernels do not support {what}; start with --attention-backend torch"
    )
