"""The engine in plain torch, for every device; the kernels are tested against it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.attention.torch_reference import TorchAttention
from worker_proc.models.base import Model
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Experts,
    LayerNorm,
    Linear,
    Parallel,
    RMSNorm,
    Rope,
)
from worker_proc.models.ops import Ops
from worker_proc.models.torch_functions import activate, cap, gate_up, route
from worker_proc.step.engine_base import Engine
from worker_proc.step.inputs import StepInputs

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

# oneDNN packs weights for a number of rows; its layout is the same for 1 to 256.
PACKED_FOR_ROWS = 32

Packed = dict[nn.Module, Tensor]


class TorchEngine(Engine):
    """A model in plain torch.

    On a CPU that multiplies bfloat16, weights are laid out as oneDNN prefers, which is nearly
    twice as fast at few rows.
    """

    name = "torch"

    def __init__(
        self, model: Model, attention: TorchAttention, ranks: "TPGroup | None" = None
    ) -> None:
        """Take a model whose other parts `ranks` have, if there are several."""
        self.model = model
        self.ranks = ranks
        self._attention = attention
        self._packed: Packed = {
            module: packed
            for module in model.modules()
            if isinstance(module, Linear | Embedding) and (packed := _pack(module)) is not None
        }

    def forward(self, inputs: StepInputs) -> Tensor:
        ops = TorchOps(self._packed, inputs, self._attention, self.ranks)
        hidden = self.model.forward(ops)
        ops.note_nonfinite(inputs)
        return hidden

    def kv_parts(self) -> Sequence[Tensor]:
        return self._attention.layers

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(TorchOps(self._packed), hidden)


class TorchOps(Ops[Tensor]):
    """A model's operations in plain torch.

    Without `inputs` only those that need no tokens, positions or pages.
    """

    def __init__(
        self,
        packed: Packed,
        inputs: StepInputs | None = None,
        attention: TorchAttention | None = None,
        ranks: "TPGroup | None" = None,
    ) -> None:
        self._packed = packed
        self._inputs = inputs
        if inputs is not None and attention is not None:
            self._heads = attention.shape
            self._attention = attention.begin_step(inputs.layout)
        self._ranks = ranks
        self._angles: dict[Rope, tuple[Tensor, Tensor]] = {}

    def note_nonfinite(self, inputs: StepInputs) -> None:
        """Note in the slot table which keys and values of the step are not finite."""
        self._attention.note_nonfinite(inputs)

    def embed(
        self, tokens: Embedding, positions: Embedding | None = None, scale: float = 1.0
    ) -> Tensor:
        assert self._inputs is not None
        x = F.embedding(self._inputs.token_ids, tokens.weight)
        if scale != 1.0:
            x = x * scale
        if positions is not None:
            x = x + F.embedding(self._inputs.positions + positions.first_row, positions.weight)
        return x

    def norm(self, norm: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
        if isinstance(norm, LayerNorm):
            return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
        gain = norm.gain
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, norm.epsilon).to(x.dtype)

    def norm_add(self, residual: Tensor, norm: RMSNorm, x: Tensor) -> Tensor:
        return residual + self.norm(norm, x)

    def linear(self, proj: Linear, x: Tensor) -> Tensor:
        projected = self._project(proj, proj.bias, x)
        if self._ranks is not None and proj.parallel is Parallel.ROW:
            projected = self._ranks.all_reduce(projected)
        return projected

    def linear_activation(self, proj: Linear, x: Tensor, activation: Activation) -> Tensor:
        return activate(activation, self.linear(proj, x))

    def linear_gated(self, proj: Linear, x: Tensor, activation: Activation) -> Tensor:
        return gate_up(activation, self.linear(proj, x))

    def linear_add(self, residual: Tensor, proj: Linear, x: Tensor, scale: float = 1.0) -> Tensor:
        added = self.linear(proj, x)
        return residual + (added if scale == 1.0 else added * scale)

    def experts_add(
        self, residual: Tensor, experts: Experts, x: Tensor, scale: float = 1.0
    ) -> Tensor:
        weights, chosen = route(experts, self.linear(experts.router, x))
        added = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            tokens, place = (chosen == number).nonzero(as_tuple=True)
            inner = self.linear_gated(
                cast(Linear, experts.gate_up[number]), x[tokens], experts.activation
            )
            output = self._project(down := cast(Linear, experts.down[number]), down.bias, inner)
            output = output * weights[tokens, place, None].to(output.dtype)
            added.index_add_(0, tokens, output)
        if self._ranks is not None:
            added = self._ranks.all_reduce(added)
        return residual + (added if scale == 1.0 else added * scale)

    def attend(self, layer: int, qkv: Tensor, attention: Attention) -> Tensor:
        heads, kv_heads = self._heads.heads, self._heads.kv_heads
        qkv = qkv.view(len(qkv), heads + 2 * kv_heads, self._heads.head_dim)
        queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        if (norms := attention.norms) is not None:
            for norm, part in ((norms.queries, queries), (norms.keys, keys)):
                part.copy_(self._norm_heads(norm, part, norms.whole))
        if attention.rope is not None:
            self._rotate(qkv[:, : heads + kv_heads], attention.rope)
        kv = qkv[:, heads:].unflatten(1, (2, kv_heads))
        return self._attention.attend(layer, queries, kv, attention)

    def logits(
        self,
        head: Linear | Embedding,
        x: Tensor,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> Tensor:
        logits = self._project(head, None if isinstance(head, Embedding) else head.bias, x)
        return cap(logits if scale == 1.0 else logits * scale, softcap)

    def _norm_heads(self, norm: RMSNorm, x: Tensor, whole: bool) -> Tensor:
        """Normalize `[tokens, heads, head_dim]`, each head or, if `whole`, each token."""
        return self.norm(norm, x.flatten(1)).view_as(x) if whole else self.norm(norm, x)

    def _project(self, weights: Linear | Embedding, bias: Tensor | None, x: Tensor) -> Tensor:
        packed = self._packed.get(weights)
        if packed is None:
            return F.linear(x, weights.weight, bias)
        projected: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return projected

    def _rotate(self, x: Tensor, rope: Rope) -> None:
        """Rotate `[tokens, heads, head_dim]` by the tokens' positions, in place."""
        rotated = x[..., : 2 * rope.cosines.shape[1]]
        cosines, sines = self._angles_of(rope, x.dtype)
        swapped = torch.roll(rotated, rope.cosines.shape[1], -1)
        rotated.mul_(cosines).addcmul_(swapped, sines)

    def _angles_of(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines `[tokens, 1, rotated channels]` of a rope."""
        if (angles := self._angles.get(rope)) is None:
            assert self._inputs is not None
            cosines = rope.cosines.index_select(0, self._inputs.positions).unsqueeze(1)
            sines = rope.sines.index_select(0, self._inputs.positions).unsqueeze(1)
            angles = self._angles[rope] = (
                torch.cat((cosines, cosines), -1).to(dtype),
                torch.cat((-sines, sines), -1).to(dtype),
            )
        return angles


def _pack(module: Linear | Embedding) -> Tensor | None:
    """Return a bfloat16 weight on a CPU in oneDNN's layout; None for any other weight.

    The weight of a linear is replaced by it. That of an embedding stays, as it is looked up, too.
    """
    weight = module.weight
    if (
        weight.device.type != "cpu"
        or weight.dtype != torch.bfloat16
        or not torch.backends.mkldnn.is_available()
        or not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)
    if isinstance(module, Linear):
        del module.weight
    return packed
