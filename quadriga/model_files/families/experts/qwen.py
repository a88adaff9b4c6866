"""Qwen 3 with a mixture of experts in all layers or in some of them.

Yang et al. 2025, https://arxiv.org/abs/2505.09388.
"""

from typing import Any

from quadriga.model_files.config.config_values import EXPERTS_ALIASES, setting, with_aliases
from quadriga.model_files.config.decoder_config import DecoderConfig, ExpertsConfig
from quadriga.model_files.config.layer_windows import DEFAULT_WINDOW


def qwen3_moe(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Qwen 3 with experts."""
    config = with_aliases(config, EXPERTS_ALIASES)
    num_layers = setting(config, "num_hidden_layers")
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if not config.get("use_sliding_window", False):
        window = None
    bias = setting(config, "attention_bias", False)
    sparse_step, dense = setting(config, "decoder_sparse_step", 1), config.get("mlp_only_layers")
    experts = ExpertsConfig(
        num_experts=setting(config, "num_local_experts", 128),
        num_chosen=setting(config, "num_experts_per_tok", 8),
        intermediate_size=setting(config, "moe_intermediate_size", 768),
        renormalize=setting(config, "norm_topk_prob", False),
        dense_layers=frozenset(
            layer
            for layer in range(num_layers)
            if layer in (dense or ()) or (layer + 1) % sparse_step
        ),
    )
    return DecoderConfig.from_hf(
        {"num_key_value_heads": 4} | config,
        qk_norm="heads",
        qkv_bias=bias,
        out_bias=bias,
        windows=(window,) * num_layers,
        experts=experts,
    )
