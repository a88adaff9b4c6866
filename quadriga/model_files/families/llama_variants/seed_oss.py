"""Seed-OSS: Llama with biased queries, keys and values.

ByteDance Seed team 2025, https://github.com/ByteDance-Seed/seed-oss.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig


def seed_oss(config: dict[str, Any]) -> DecoderConfig:
    """Read a Seed-OSS's config.json."""
    config = with_defaults(config, num_key_value_heads=8)
    return DecoderConfig.from_hf(
        {"head_dim": 128, **config},
        qkv_bias=setting(config, "attention_bias", True),
        out_bias=setting(config, "attention_out_bias", False),
        mlp_bias=setting(config, "mlp_bias", False),
    )
