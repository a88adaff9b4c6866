"""Granite with a mixture of experts: Llama with four scales, and stacked expert weights.

IBM 2024, https://github.com/ibm-granite/granite-3.0-language-models.
"""

from typing import Any

from quadriga.model_files.config.config_values import head_dim_of, setting
from quadriga.model_files.config.decoder_config import DecoderConfig, ExpertsConfig

NAMES = {
    "router": "block_sparse_moe.router.layer",
    "expert": "block_sparse_moe.experts.{}",
    "experts_gate_up": "block_sparse_moe.input_linear",
    "experts_down": "block_sparse_moe.output_linear",
}


def granitemoe(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Granite with experts."""
    bias = setting(config, "attention_bias", False)
    scale = config.get("attention_multiplier", 1.0)
    return DecoderConfig.from_hf(
        config,
        qkv_bias=bias,
        out_bias=bias,
        attention_scale=head_dim_of(config) ** -0.5 if scale is None else float(scale),
        embedding_scale=float(setting(config, "embedding_multiplier", 1.0)),
        residual_scale=float(setting(config, "residual_multiplier", 1.0)),
        logit_scale=1 / float(setting(config, "logits_scaling", 1.0)),
        experts=ExpertsConfig(
            num_experts=setting(config, "num_local_experts", 8),
            num_chosen=setting(config, "num_experts_per_tok", 2),
            intermediate_size=setting(config, "intermediate_size"),
        ),
        names=NAMES,
    )
