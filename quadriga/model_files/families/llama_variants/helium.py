"""Helium: Llama that rotates neighbouring channels.

Kyutai 2025, https://kyutai.org/2025/04/30/helium.html.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig


def helium(config: dict[str, Any]) -> DecoderConfig:
    """Read a Helium's config.json."""
    defaults = {
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    }
    return DecoderConfig.from_hf(
        with_defaults(config, **defaults),
        interleaved_rope=True,
        qkv_bias=setting(config, "attention_bias", False),
        mlp_bias=setting(config, "mlp_bias", False),
    )
