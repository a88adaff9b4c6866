"""Llama and Mistral: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Jiang et al. 2023,
https://arxiv.org/abs/2310.06825.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.layer_windows import (
    DEFAULT_WINDOW,
    layer_windows,
    mistral_windows,
)


def llama(config: dict[str, Any]) -> DecoderConfig:
    """Read a Llama's config.json."""
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=setting(config, "mlp_bias", False),
        skipped=(".rotary_emb.inv_freq",),
    )


def mistral(config: dict[str, Any]) -> DecoderConfig:
    """Read a Mistral's config.json; with `layer_types`, some layers may have no window."""
    num_layers = setting(config, "num_hidden_layers")
    windows = mistral_windows(config, num_layers)
    if config.get("layer_types"):
        windows = layer_windows(config, [], DEFAULT_WINDOW)
    return DecoderConfig.from_hf(config, windows=windows)
