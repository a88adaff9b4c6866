"""Execute a model's operations on a GPU: torch multiplies matrices, Triton kernels do the rest."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.gpu.kernels.experts import GroupedExperts
from worker_proc.gpu.kernels.rows import activate_, add_and_norm, embed, gate_up, norm_and_add
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

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

HEAD_MULTIPLE = 64

# x [rows, inputs], weight [outputs, inputs] and bias [outputs] or None to [rows, outputs], which is
# written to the last argument unless it is None.
Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def multiply_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply as torch's linear does."""
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


@dataclass(slots=True)
class Hidden:
    """A value of the model.

    Attributes:
        x: [tokens, width].
        added: what is still to be added to `x`; the next norm adds it in its own kernel.
        factor: of `added`.
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

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but some."""
        self.x = self.x.index_select(0, rows)
        if self.added is not None:
            self.added = self.added.index_select(0, rows)


class PaddedHeads:
    """Heads whose number of outputs is a multiple of HEAD_MULTIPLE.

    cuBLAS has its fast kernels only for rows of logits that begin at aligned places. The weight of
    the module becomes a part of the padded one, so that it is in memory once.
    """

    @staticmethod
    def size(vocab_size: int) -> int:
        """Return the number of outputs of a padded head."""
        return -(-vocab_size // HEAD_MULTIPLE) * HEAD_MULTIPLE

    def __init__(self) -> None:
        self._padded: dict[nn.Module, tuple[Tensor, Tensor | None]] = {}

    def of(self, head: Linear | Embedding) -> tuple[Tensor, Tensor | None]:
        """Return weight `[padded, inputs]` and bias `[padded]` of a head."""
        if head not in self._padded:
            bias = head.bias if isinstance(head, Linear) else None
            lacking = self.size(len(head.weight)) - len(head.weight)
            if lacking:
                num_rows = len(head.weight)
                weight = F.pad(head.weight.data, (0, 0, 0, lacking))
                head.weight.data = weight[:num_rows]
                bias = None if bias is None else F.pad(bias.data, (0, lacking))
            else:
                weight = head.weight
            self._padded[head] = weight, bias
        return self._padded[head]


class TritonOps(Ops[Hidden]):
    """Keeps the residual stream in float32 and everything else in the dtype of the weights.

    Args:
        pages: the KV pages.
        metadata: tokens, positions and pages of the step; None for `compute_logits` alone.
        multiply: the matrix product.
        tp_group: the ranks that have the other parts of the model, if there are several.
        experts: the mixtures of experts of the model.
        heads: the padded heads of the model.
        sampled: `[samples]` the tokens that sample, fewer than all. What follows the last attention
            is computed of them only, as no other token needs the rest. None: of all tokens.
        logits_buffer: `[rows, outputs of the padded head]` whose first rows get the logits; None:
            new memory gets them.
    """

    def __init__(
        self,
        pages: Pages,
        metadata: AttentionMetadata | None = None,
        multiply: Multiply = multiply_by_torch,
        tp_group: "TPGroup | None" = None,
        experts: Mapping[Experts, GroupedExperts] | None = None,
        heads: PaddedHeads | None = None,
        sampled: Tensor | None = None,
        logits_buffer: Tensor | None = None,
    ) -> None:
        self._pages = pages
        self._metadata = metadata
        self._multiply = multiply
        self._tp_group = tp_group
        self._experts = experts or {}
        self._heads = heads or PaddedHeads()
        self._sampled = sampled
        self._logits_buffer = logits_buffer
        self._has_attended = False  # in the last layer

    def embed(
        self,
        tokens: Embedding,
        positions: Embedding | None = None,
        scale: float = 1.0,
        second_type: Tensor | None = None,
    ) -> Hidden:
        step = self._metadata
        assert step is not None
        assert second_type is None  # of encoders, which plain torch computes
        return Hidden(embed(step.known, step.slots, step.positions, tokens, positions, scale))

    def norm(self, norm: LayerNorm | RMSNorm, x: Hidden) -> Hidden:
        self._keep_sampled(x)
        added, x.added = x.added, None
        return Hidden(add_and_norm(x.x, added, norm, x.factor))

    def norm_residual(self, norm: LayerNorm | RMSNorm, residual: Hidden) -> Hidden:
        return Hidden(self.norm(norm, residual).x.float())

    def norm_add(self, residual: Hidden, norm: RMSNorm, x: Hidden) -> Hidden:
        self._keep_sampled(residual)
        norm_and_add(residual.settled(), norm, x.x)
        return residual

    def linear(self, proj: Linear, x: Hidden) -> Hidden:
        rows = x.settled().to(proj.weight.dtype)  # which the residual stream does not have
        if proj.product is not None:
            projected = proj.product(rows)
        else:
            projected = self._multiply(rows, proj.weight, proj.bias, None)
        if self._tp_group is not None and proj.parallel is Parallel.ROW:
            projected = self._tp_group.all_reduce(projected)
        return Hidden(projected)

    def linear_activation(self, proj: Linear, x: Hidden, activation: Activation) -> Hidden:
        return Hidden(activate_(self.linear(proj, x).x, activation))

    def linear_gated(self, proj: Linear, x: Hidden, activation: Activation) -> Hidden:
        return Hidden(gate_up(self.linear(proj, x).x, activation))

    def linear_add(self, residual: Hidden, proj: Linear, x: Hidden, scale: float = 1.0) -> Hidden:
        self._keep_sampled(residual)
        return Hidden(residual.settled(), self.linear(proj, x).x, scale)

    def experts_add(
        self, residual: Hidden, experts: Experts, x: Hidden, scale: float = 1.0
    ) -> Hidden:
        self._keep_sampled(residual)
        added = self._experts[experts].output(x.x, self.linear(experts.router, x).x)
        if self._tp_group is not None:
            added = self._tp_group.all_reduce(added)
        return Hidden(residual.settled(), added, scale)

    def attend(self, layer: int, qkv: Hidden, attention: Attention) -> Hidden:
        assert self._metadata is not None
        heads = qkv.x.unflatten(1, (-1, self._pages.shape.head_dim))
        attended = Hidden(self._metadata.attend(self._pages.layers[layer], heads, attention))
        self._has_attended = layer == len(self._pages.layers) - 1
        self._keep_sampled(attended)
        return attended

    def _keep_sampled(self, x: Hidden) -> None:
        """After the last attention, drop the tokens that do not sample."""
        sampled = self._sampled
        if self._has_attended and sampled is not None and len(x.x) != len(sampled):
            x.keep(sampled)

    def logits(
        self,
        head: Linear | Embedding,
        x: Hidden,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Hidden:
        buffer, vocab_size = self._logits_buffer, len(head.weight)
        out = None if buffer is None else buffer[: len(x.x)]
        if isinstance(head, Linear) and head.product is not None:
            logits = head.product(x.x)
            if out is not None:
                logits = out[:, :vocab_size].copy_(logits)
        else:
            weight, bias = self._heads.of(head)
            logits = self._multiply(x.x, weight, bias, out)[:, :vocab_size]
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return Hidden(logits)
