"""Qwen 2 and 3: Llama with biased queries, keys and values, or with normalized heads.

Yang et al. 2024, https://arxiv.org/abs/2407.10671; Yang et al. 2025,
https://arxiv.org/abs/2505.09388.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.layer_windows import qwen_windows


def qwen2(config: dict[str, Any]) -> DecoderConfig:
    """Read a Qwen 2's config.json."""
    windows = qwen_windows(config, setting(config, "num_hidden_layers"))
    return DecoderConfig.from_hf(config, qkv_bias=True, windows=windows)


def qwen3(config: dict[str, Any]) -> DecoderConfig:
    """Read a Qwen 3's config.json."""
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        qk_norm="heads",
        qkv_bias=bias,
        out_bias=bias,
        windows=qwen_windows(config, setting(config, "num_hidden_layers")),
    )
