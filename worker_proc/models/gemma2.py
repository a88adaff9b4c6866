"""Gemma 2: norms before and after each part of a block, bounded scores, windows in turns.

Gemma team 2024, https://arxiv.org/abs/2408.00118.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quadriga.model_files.architectures import GemmaConfig
from worker_proc.attention.base import AttentionShape
from worker_proc.models.base import Model
from worker_proc.models.layers import Activation, Attention, Embedding, QKNorms, RMSNorm, Rope
from worker_proc.models.llama import LlamaBlock
from worker_proc.models.ops import Ops, Value
from worker_proc.models.rope_scaling import rope_frequencies


class Gemma2(Model):
    """A Llama with more norms, whose checkpoints store the weights of norms minus 1.

    Attributes:
        head_norms: Query and key heads are normalised.
    """

    head_norms = False

    def __init__(self, hf_config: dict[str, Any], tp_size: int = 1) -> None:
        super().__init__()
        self.config = config = GemmaConfig.from_hf(hf_config, tp_size)
        self.vocab_size = config.vocab_size
        self.attention_shape = AttentionShape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
        )
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        # As in training, the factor is rounded to the number format of the weights.
        scale = torch.tensor(config.hidden_size**0.5, device="cpu")
        self.embedding_scale = float(scale.to(self.embedding.weight.dtype))
        self.blocks = nn.ModuleList(
            Gemma2Block(config, window, self.head_norms) for window in config.windows
        )
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)

    def forward(self, ops: Ops[Value]) -> Value:
        x = ops.embed(self.embedding, scale=self.embedding_scale)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Gemma2Block)
            x = block.forward(ops, layer, x)
        return x

    def compute_logits(self, ops: Ops[Value], hidden: Value) -> Value:
        x = ops.norm(self.final_norm, hidden)
        return ops.logits(self.embedding, x, softcap=self.config.final_softcap)

    def finish_loading(self, context_length: int) -> None:
        device = self.embedding.weight.device
        whole, local = (
            Rope(frequencies, context_length, device, attention_factor)
            for frequencies, attention_factor in (
                rope_frequencies(scaling, context_length)
                for scaling in (self.config.rope, self.config.local_rope)
            )
        )
        for block in self.blocks:
            assert isinstance(block, Gemma2Block)
            block.attention.rope = whole if block.attention.window is None else local

    def map_weight_name(self, name: str) -> str | None:
        return None if name == "lm_head.weight" else name

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        tensors = {
            "model.embed_tokens.weight": self.embedding.weight,
            "model.norm.weight": self.final_norm.weight,
        }
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Gemma2Block)
            for name, tensor in block.checkpoint_tensors().items():
                tensors[f"model.layers.{layer}.{name}"] = tensor
        return tensors


class Gemma2Block(LlamaBlock):
    """Attention and gated MLP, each between two RMSNorms and added to the residual stream."""

    def __init__(self, config: GemmaConfig, window: int | None, head_norms: bool) -> None:
        super().__init__(config, qkv_bias=False, head_norms=False)
        self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0) for _ in range(4)
        )
        dim = config.head_dim
        norms = QKNorms(dim, dim, config.rms_norm_eps, offset=1.0) if head_norms else None
        self.attention = Attention(config.attention_scale, norms, config.attention_softcap, window)

    def forward(self, ops: Ops[Value], layer: int, x: Value) -> Value:
        qkv = ops.linear(self.qkv_proj, ops.norm(self.attention_norm, x))
        attended = ops.linear(self.out_proj, ops.attend(layer, qkv, self.attention))
        x = ops.norm_add(x, self.attention_post_norm, attended)
        x_mlp = ops.norm(self.mlp_norm, x)
        x_mlp = ops.linear_gated(self.gate_up_proj, x_mlp, Activation.GELU_TANH)
        return ops.norm_add(x, self.mlp_post_norm, ops.linear(self.down_proj, x_mlp))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        return super().checkpoint_tensors() | {
            "post_attention_layernorm.weight": self.attention_post_norm.weight,
            "pre_feedforward_layernorm.weight": self.mlp_norm.weight,
            "post_feedforward_layernorm.weight": self.mlp_post_norm.weight,
        }
