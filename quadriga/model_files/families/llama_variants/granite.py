"""Granite 3, dense sizes: Llama with factors of embeddings, scores, residuals and logits.

Granite team 2024, https://github.com/ibm-granite/granite-3.0-language-models.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting
from quadriga.model_files.config.decoder_config import DecoderConfig


def granite(config: dict[str, Any]) -> DecoderConfig:
    """Read a Granite's config.json."""
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=setting(config, "mlp_bias", False),
        attention_scale=setting(config, "attention_multiplier", 1.0),
        embedding_scale=setting(config, "embedding_multiplier", 1.0),
        residual_scale=setting(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / setting(config, "logits_scaling", 1.0),
    )
