"""Gemma 1: Llama with GELU, scaled embeddings, and norms whose weights are stored minus 1.

Gemma team 2024, https://arxiv.org/abs/2403.08295.
"""

from typing import Any

from quadriga.model_files.config.config_values import require, setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of


def gemma(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 1's config.json."""
    require(config, "use_bidirectional_attention", (False, None))
    config = with_defaults(
        config, num_key_value_heads=16, head_dim=256, hidden_act="gelu", tie_word_embeddings=True
    )
    activation = activation_of(config, "hidden_act")
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        norm_offset=1.0,
        qkv_bias=bias,
        out_bias=bias,
        # The first checkpoints name "gelu", and were trained with its approximation.
        activation="gelu_tanh" if activation == "gelu" else activation,
        embedding_scale=setting(config, "hidden_size") ** 0.5,
    )
