"""GPT-2: learned positions, LayerNorm before each block, fused QKV, GELU.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from typing import Any

import torch
from torch import Tensor, nn

from quadriga.model_files.architectures import GPT2Config
from worker_proc.attention.base import AttentionShape
from worker_proc.models.base import Model
from worker_proc.models.layers import (
    Activation,
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    Parallel,
)
from worker_proc.models.ops import Ops, Value


class GPT2(Model):
    """GPT-2 and its fine-tunes."""

    def __init__(self, hf_config: dict[str, Any], tp_size: int = 1) -> None:
        super().__init__()
        config = GPT2Config.from_hf(hf_config, tp_size)
        self.vocab_size = config.vocab_size
        self.attention_shape = AttentionShape(
            config.num_layers, config.num_heads, config.num_heads, config.head_dim
        )
        self.token_embedding = Embedding(config.vocab_size, config.hidden_size)
        self.position_embedding = Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(GPT2Block(config) for _ in range(config.num_layers))
        self.final_norm = LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = (
            None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        )

    def forward(self, ops: Ops[Value]) -> Value:
        x = ops.embed(self.token_embedding, self.position_embedding)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, GPT2Block)
            x = block.forward(ops, layer, x)
        return x

    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        return ops.logits(self.lm_head or self.token_embedding, ops.norm(self.final_norm, hidden))

    def map_weight_name(self, name: str) -> str | None:
        name = name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return None  # old checkpoints store the causal mask
        return None if name == "lm_head.weight" and self.lm_head is None else name

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors = {
            "wte.weight": self.token_embedding.weight,
            "wpe.weight": self.position_embedding.weight,
            "ln_f.weight": self.final_norm.weight,
            "ln_f.bias": self.final_norm.bias,
        }
        if self.lm_head is not None:
            tensors["lm_head.weight"] = self.lm_head.weight
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, GPT2Block)
            for name, tensor in block.checkpoint_tensors().items():
                tensors[f"h.{layer}.{name}"] = tensor
        return tensors


class GPT2Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        hidden_size, attended = config.hidden_size, config.num_heads * config.head_dim
        self.attention_norm = LayerNorm(hidden_size, config.layer_norm_epsilon)
        self.qkv_proj = Linear(hidden_size, 3 * attended, True, Parallel.COLUMN, fused=3)
        self.attention = Attention(config.head_dim**-0.5)
        self.out_proj = Linear(attended, hidden_size, True, Parallel.ROW)
        self.mlp_norm = LayerNorm(hidden_size, config.layer_norm_epsilon)
        self.up_proj = Linear(hidden_size, config.intermediate_size, True, Parallel.COLUMN)
        self.down_proj = Linear(config.intermediate_size, hidden_size, True, Parallel.ROW)

    def forward(self, ops: Ops[Value], layer: int, x: Value) -> Value:
        qkv = ops.linear(self.qkv_proj, ops.norm(self.attention_norm, x))
        x = ops.linear_add(x, self.out_proj, ops.attend(layer, qkv, self.attention))
        x_mlp = ops.norm(self.mlp_norm, x)
        x_mlp = ops.linear_activation(self.up_proj, x_mlp, Activation.GELU_TANH)
        return ops.linear_add(x, self.down_proj, x_mlp)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, norm in (("ln_1", self.attention_norm), ("ln_2", self.mlp_norm)):
            tensors |= {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}
        for name, linear in (
            ("attn.c_attn", self.qkv_proj),
            ("attn.c_proj", self.out_proj),
            ("mlp.c_fc", self.up_proj),
            ("mlp.c_proj", self.down_proj),
        ):
            assert isinstance(linear.bias, torch.Tensor)
            # The checkpoint stores these weights as [inputs, outputs].
            tensors |= {f"{name}.weight": linear.weight.t(), f"{name}.bias": linear.bias}
        return tensors
