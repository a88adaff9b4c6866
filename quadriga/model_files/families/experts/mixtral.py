"""Mixtral: Mistral with a mixture of experts in each layer.

Jiang et al. 2024, https://arxiv.org/abs/2401.04088.
"""

from typing import Any

from quadriga.model_files.config.config_values import EXPERTS_ALIASES, setting, with_aliases
from quadriga.model_files.config.decoder_config import DecoderConfig, ExpertsConfig

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
NAMES = {
    "router": "block_sparse_moe.gate",
    "expert": "block_sparse_moe.experts.{}",
    "expert_gate": "w1",
    "expert_up": "w3",
    "expert_down": "w2",
}


def mixtral(config: dict[str, Any]) -> DecoderConfig:
    """Read a Mixtral's config.json."""
    config = with_aliases(config, EXPERTS_ALIASES)
    window = config.get("sliding_window")
    return DecoderConfig.from_hf(
        DEFAULTS | config,
        windows=(window,) * setting(config, "num_hidden_layers"),
        experts=ExpertsConfig(
            num_experts=setting(config, "num_local_experts", 8),
            num_chosen=setting(config, "num_experts_per_tok", 2),
            intermediate_size=setting(config, "intermediate_size"),
        ),
        names=NAMES,
    )
