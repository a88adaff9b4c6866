"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971; scaled positions are in rope_scaling.py.
Mistral 7B (https://arxiv.org/abs/2310.06825) is the same where
its window is not shorter than the context, Qwen 2 (https://arxiv.org/abs/2407.10671) has biased
queries, keys and values, and Qwen 3 (https://arxiv.org/abs/2505.09388) normalises the heads of
queries and keys.
"""

from typing import Any

from torch import Tensor, nn

from quadriga.model_files.architectures import LlamaConfig
from worker_proc.attention.base import AttentionShape
from worker_proc.models.base import Model
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    Linear,
    Parallel,
    QKNorms,
    RMSNorm,
    Rope,
)
from worker_proc.models.ops import Ops, Value
from worker_proc.models.rope_scaling import rope_frequencies


class Llama(Model):
    """Llama and Mistral.

    Attributes:
        qkv_bias: Queries, keys and values have a bias even if config.json has no `attention_bias`.
        head_norms: Query and key heads are normalised.
    """

    qkv_bias = False
    head_norms = False

    def __init__(self, hf_config: dict[str, Any], tp_size: int = 1) -> None:
        super().__init__()
        self.config = config = LlamaConfig.from_hf(hf_config, tp_size)
        self.vocab_size = config.vocab_size
        self.attention_shape = AttentionShape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            LlamaBlock(config, self.qkv_bias, self.head_norms) for _ in range(config.num_layers)
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )

    def forward(self, ops: Ops[Value]) -> Value:
        x = ops.embed(self.embedding)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, LlamaBlock)
            x = block.forward(ops, layer, x)
        return x

    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        return ops.logits(self.lm_head or self.embedding, ops.norm(self.final_norm, hidden))

    def finish_loading(self, context_length: int) -> None:
        frequencies, attention_factor = rope_frequencies(self.config.rope, context_length)
        device = self.embedding.weight.device
        rope = Rope(frequencies, context_length, device, attention_factor)
        for block in self.blocks:
            assert isinstance(block, LlamaBlock)
            block.attention.rope = rope

    def map_weight_name(self, name: str) -> str | None:
        if name.endswith(".rotary_emb.inv_freq"):
            return None  # old checkpoints store this constant
        return None if name == "lm_head.weight" and self.lm_head is None else name

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.final_norm.weight,
        }
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head.weight
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, LlamaBlock)
            for name, tensor in block.checkpoint_tensors().items():
                tensors[f"model.layers.{layer}.{name}"] = tensor
        return tensors


class Qwen2(Llama):
    """Llama with biased queries, keys and values."""

    qkv_bias = True


class Qwen3(Llama):
    """Llama with normalised query and key heads."""

    head_norms = True


class LlamaBlock(nn.Module):
    """Attention and gated MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, qkv_bias: bool, head_norms: bool) -> None:
        super().__init__()
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        self.intermediate_size = inner = config.intermediate_size
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        hidden_size, qkv_size = config.hidden_size, self.q_size + 2 * self.kv_size
        qkv_bias = qkv_bias or config.attention_bias
        self.qkv_proj = Linear(hidden_size, qkv_size, qkv_bias, Parallel.COLUMN)
        dim = config.head_dim
        norms = QKNorms(dim, dim, config.rms_norm_eps) if head_norms else None
        self.attention = Attention(dim**-0.5, norms)
        self.out_proj = Linear(self.q_size, hidden_size, config.attention_bias, Parallel.ROW)
        self.mlp_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.gate_up_proj = Linear(hidden_size, 2 * inner, config.mlp_bias, Parallel.COLUMN)
        self.down_proj = Linear(inner, hidden_size, config.mlp_bias, Parallel.ROW)

    def forward(self, ops: Ops[Value], layer: int, x: Value) -> Value:
        qkv = ops.linear(self.qkv_proj, ops.norm(self.attention_norm, x))
        x = ops.linear_add(x, self.out_proj, ops.attend(layer, qkv, self.attention))
        x_mlp = ops.norm(self.mlp_norm, x)
        x_mlp = ops.linear_gated(self.gate_up_proj, x_mlp, Activation.SILU)
        return ops.linear_add(x, self.down_proj, x_mlp)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors = {
            "input_layernorm.weight": self.attention_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
        }
        if (norms := self.attention.norms) is not None:
            tensors["self_attn.q_norm.weight"] = norms.queries.weight
            tensors["self_attn.k_norm.weight"] = norms.keys.weight
        heads = {"q_proj": self.q_size, "k_proj": self.kv_size, "v_proj": self.kv_size}
        gated = {"gate_proj": self.intermediate_size, "up_proj": self.intermediate_size}
        tensors |= _parts("self_attn", self.qkv_proj, heads)
        tensors |= _parts("self_attn", self.out_proj, {"o_proj": len(self.out_proj.weight)})
        tensors |= _parts("mlp", self.gate_up_proj, gated)
        tensors |= _parts("mlp", self.down_proj, {"down_proj": len(self.down_proj.weight)})
        return tensors


def _parts(prefix: str, linear: Linear, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return the row ranges of a fused projection by their names in the checkpoint."""
    tensors = {}
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            for name, part in zip(sizes, fused.split(list(sizes.values())), strict=True):
                tensors[f"{prefix}.{name}.{kind}"] = part
    return tensors
