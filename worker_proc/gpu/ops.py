"""Execute a model's operations on a GPU: products in the fastest way, and Triton kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.gpu.kernels.adapters import StepAdapters
from worker_proc.gpu.kernels.experts import GroupedExperts
from worker_proc.gpu.kernels.rows import add_and_norm, embed, norm_and_add
from worker_proc.gpu.pages import AttentionMetadata, Pages
from worker_proc.gpu.products import Products, Projection
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


@dataclass(slots=True)
class Hidden:
    """A value of the model.

    Attributes:
        x: [tokens, width].
        added: what is still to be added to `x`; the next norm adds it in its own kernel.
        factor: of `added`.
        norm: the norm of `residual` that is still to be computed, whose place `x` keeps. A product
            may do that in its own kernel.
        residual: the residual stream, see `norm`.
    """

    x: Tensor
    added: Tensor | None = None
    factor: float = 1.0
    norm: LayerNorm | RMSNorm | None = None
    residual: "Hidden | None" = None

    def settled(self) -> Tensor:
        """Return `x` with everything added, or normalized."""
        if self.norm is not None:
            assert self.residual is not None
            added, self.residual.added = self.residual.added, None
            self.x = add_and_norm(self.residual.x, added, self.norm, self.residual.factor)
            self.norm = None
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
        products: how linear layers are computed.
        tp_group: the ranks that have the other parts of the model, if there are several.
        experts: the mixtures of experts of the model.
        heads: the padded heads of the model.
        sampled: `[samples]` the tokens that sample, fewer than all. What follows the last attention
            is computed of them only, as no other token needs the rest. None: of all tokens.
        logits_buffer: `[rows, outputs of the padded head]` whose first rows get the logits; None:
            new memory gets them.
        adapted: the tokens that have adapters, if any do; without metadata, the rows.
        adapted_samples: those of `sampled`.
    """

    def __init__(
        self,
        pages: Pages,
        metadata: AttentionMetadata | None = None,
        products: Products | None = None,
        tp_group: "TPGroup | None" = None,
        experts: Mapping[Experts, GroupedExperts] | None = None,
        heads: PaddedHeads | None = None,
        sampled: Tensor | None = None,
        logits_buffer: Tensor | None = None,
        adapted: StepAdapters | None = None,
        adapted_samples: StepAdapters | None = None,
    ) -> None:
        self._pages = pages
        self._metadata = metadata
        self._products = products or Products()
        self._tp_group = tp_group
        self._experts = experts or {}
        self._heads = heads or PaddedHeads()
        self._sampled = sampled
        self._logits_buffer = logits_buffer
        self._adapted, self._adapted_samples = adapted, adapted_samples
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
        x = embed(step.known, step.slots, step.positions, tokens, positions, scale)
        if self._adapted is not None:
            of_step = step.known, step.slots, step.positions
            self._adapted.add_embedding(*of_step, tokens, scale, x)
        return Hidden(x)

    def norm(self, norm: LayerNorm | RMSNorm, x: Hidden) -> Hidden:
        self._keep_sampled(x)
        return Hidden(x.x, norm=norm, residual=x)

    def norm_residual(self, norm: LayerNorm | RMSNorm, residual: Hidden) -> Hidden:
        return Hidden(self.norm(norm, residual).settled().float())

    def norm_add(self, residual: Hidden, norm: RMSNorm, x: Hidden) -> Hidden:
        self._keep_sampled(residual)
        norm_and_add(residual.settled(), norm, x.x)
        return residual

    def linear(self, proj: Linear, x: Hidden) -> Hidden:
        return Hidden(self._projected(Projection(proj), x))

    def linear_activation(self, proj: Linear, x: Hidden, activation: Activation) -> Hidden:
        return Hidden(self._projected(Projection(proj, activation=activation), x))

    def linear_gated(self, proj: Linear, x: Hidden, activation: Activation) -> Hidden:
        return Hidden(self._projected(Projection(proj, activation=activation, is_gated=True), x))

    def linear_add(self, residual: Hidden, proj: Linear, x: Hidden, scale: float = 1.0) -> Hidden:
        self._keep_sampled(residual)
        product, rows = Projection(proj, adds=True), x.settled()
        if self._may_choose(proj) and (way := self._products.way_of(product, len(rows))):
            self._products.project_few(way, rows, product, residual.settled(), scale)
            return residual
        return Hidden(residual.settled(), self._projected(product, x), scale)

    def _projected(self, product: Projection, x: Hidden) -> Tensor:
        """Compute a product and its activation; behind a norm in one kernel, if that was chosen."""
        proj = product.proj
        if not self._may_choose(proj):
            return product.finish(self._multiplied(proj, self._rows(proj, x)))
        residual = x.residual if x.norm is not None else None
        if residual is not None:
            normed = replace(product, norm=x.norm)
            way = self._products.way_of(normed, len(residual.x))
            if way is not None and residual.added is None:
                return self._products.project_few(way, residual.x, normed)
        rows = self._rows(proj, x)
        if not product.adds and (way := self._products.way_of(product, len(rows))):
            return self._products.project_few(way, rows, product)
        return self._products.project(rows, product)

    def _rows(self, proj: Linear, x: Hidden) -> Tensor:
        """Return rows in the dtype of a weight, which the residual stream does not have."""
        return x.settled().to(proj.weight.dtype)

    def _may_choose(self, proj: Linear) -> bool:
        """Return whether a product may be computed by what was the fastest here.

        Quantized weights have a product of their own. Ranks that compute the same numbers must
        compute them alike, and sums over the ranks are added up before anything else.
        """
        is_alone = self._tp_group is None or proj.parallel is Parallel.COLUMN
        return is_alone and proj.product is None and self._adapted_now is None

    def _multiplied(self, proj: Linear, rows: Tensor) -> Tensor:
        """Return x Wᵀ + b by the usual library, with adapters, summed over the ranks."""
        if proj.product is not None:
            projected = proj.product(rows)
        else:
            projected = self._products.multiply(rows, proj.weight, proj.bias)
        if self._adapted_now is not None:
            self._adapted_now.adapt(proj, rows, projected, proj.bias)
        if self._tp_group is not None and proj.parallel is Parallel.ROW:
            return self._tp_group.all_reduce(projected)
        return projected

    @property
    def _adapted_now(self) -> StepAdapters | None:
        """The rows with adapters among those that are being computed."""
        only_samples = self._has_attended and self._sampled is not None
        return self._adapted_samples if only_samples else self._adapted

    def experts_add(
        self, residual: Hidden, experts: Experts, x: Hidden, scale: float = 1.0
    ) -> Hidden:
        self._keep_sampled(residual)
        rows = x.settled()
        scores = self.linear(experts.router, x).x
        added = self._experts[experts].output(rows, scores, self._adapted_now)
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
        rows, buffer, vocab_size = x.settled(), self._logits_buffer, len(head.weight)
        out = None if buffer is None else buffer[: len(rows)]
        if isinstance(head, Linear) and head.product is not None:
            logits = head.product(rows)
            if out is not None:
                logits = out[:, :vocab_size].copy_(logits)
        else:
            weight, bias = self._heads.of(head)
            logits = self._products.multiply(rows, weight, bias, out)[:, :vocab_size]
        if self._adapted_now is not None:
            bias = head.bias if isinstance(head, Linear) else None
            self._adapted_now.adapt(head, rows, logits, bias)
        if scale != 1.0:
            logits.mul_(scale)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return Hidden(logits)
