"""The engine in plain torch, for every device; the kernels are tested against it."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.attention.torch_reference import TorchAttention
from worker_proc.models.base import Model
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
        self._ranks = ranks
        self._attention = attention
        self._packed: Packed = {
            module: packed
            for module in model.modules()
            if isinstance(module, Linear | Embedding) and (packed := _pack(module)) is not None
        }

    def forward(self, inputs: StepInputs) -> Tensor:
        return self.model.forward(TorchOps(self._packed, inputs, self._attention, self._ranks))

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
        self._angles: tuple[Tensor, Tensor] | None = None

    def embed(self, tokens: Embedding, positions: Embedding | None = None) -> Tensor:
        assert self._inputs is not None
        x = F.embedding(self._inputs.token_ids, tokens.weight)
        if positions is not None:
            x = x + F.embedding(self._inputs.positions, positions.weight)
        return x

    def norm(self, norm: LayerNorm | RMSNorm, x: Tensor) -> Tensor:
        if isinstance(norm, LayerNorm):
            return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.epsilon)

    def linear(self, proj: Linear, x: Tensor) -> Tensor:
        return self._project(proj, proj.bias, x)

    def linear_gelu(self, proj: Linear, x: Tensor) -> Tensor:
        return F.gelu(self.linear(proj, x), approximate="tanh")

    def linear_swiglu(self, proj: Linear, x: Tensor) -> Tensor:
        gate, up = self.linear(proj, x).chunk(2, -1)
        return F.silu(gate) * up

    def linear_add(self, residual: Tensor, proj: Linear, x: Tensor) -> Tensor:
        added = self.linear(proj, x)
        if self._ranks is not None and proj.parallel is Parallel.ROW:
            added = self._ranks.all_reduce(added)
        return residual + added

    def attend(
        self, layer: int, qkv: Tensor, rope: Rope | None, norms: HeadNorms | None = None
    ) -> Tensor:
        heads, kv_heads = self._heads.heads, self._heads.kv_heads
        qkv = qkv.view(len(qkv), heads + 2 * kv_heads, self._heads.head_dim)
        if norms is not None:
            queries, keys = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
            queries.copy_(self.norm(norms.queries, queries))
            keys.copy_(self.norm(norms.keys, keys))
        if rope is not None:
            self._rotate(qkv[:, : heads + kv_heads], rope)
        kv = qkv[:, heads:].unflatten(1, (2, kv_heads))
        return self._attention.attend(layer, qkv[:, :heads], kv)

    def logits(self, head: Linear | Embedding, x: Tensor) -> Tensor:
        return self._project(head, None, x)

    def _project(self, weights: Linear | Embedding, bias: Tensor | None, x: Tensor) -> Tensor:
        packed = self._packed.get(weights)
        if packed is None:
            return F.linear(x, weights.weight, bias)
        projected: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return projected

    def _rotate(self, x: Tensor, rope: Rope) -> None:
        """Rotate `[tokens, heads, head_dim]` by the tokens' positions, in place."""
        if self._angles is None:
            assert self._inputs is not None
            cosines = rope.cosines.index_select(0, self._inputs.positions).unsqueeze(1)
            sines = rope.sines.index_select(0, self._inputs.positions).unsqueeze(1)
            self._angles = (
                torch.cat((cosines, cosines), -1).to(x.dtype),
                torch.cat((-sines, sines), -1).to(x.dtype),
            )
        cosines, sines = self._angles
        swapped = torch.roll(x, x.shape[-1] // 2, -1)
        x.mul_(cosines).addcmul_(swapped, sines)


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
