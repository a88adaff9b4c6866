"""gpt-oss: experts with biases and a clamped gate, attention sinks, windows in every other layer.

OpenAI 2025, https://arxiv.org/abs/2508.10925.
"""

from typing import Any

from quadriga.model_files.config.config_values import (
    EXPERTS_ALIASES,
    require,
    setting,
    with_aliases,
)
from quadriga.model_files.config.decoder_config import DecoderConfig, ExpertsConfig
from quadriga.model_files.config.layer_windows import layer_windows, periodic_types

DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
}
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
NAMES = {
    "router": "mlp.router",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}


def gpt_oss(config: dict[str, Any]) -> DecoderConfig:
    """Read a gpt-oss's config.json."""
    config = with_aliases(config, EXPERTS_ALIASES)
    require(config, "hidden_act", ("silu",))
    require(config, "swiglu_alpha", (1.702,))
    require(config, "swiglu_limit", (7.0,))
    # An empty object stands for positions that are not scaled.
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = config | {"rope_scaling": DEFAULT_ROPE}
    bias = setting(config, "attention_bias", True)
    return DecoderConfig.from_hf(
        DEFAULTS | config,
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        activation="clamped_swiglu",
        windows=layer_windows(config, periodic_types(config, 2), default_window=128),
        experts=ExpertsConfig(
            num_experts=setting(config, "num_local_experts", 128),
            num_chosen=setting(config, "num_experts_per_tok", 4),
            intermediate_size=setting(config, "intermediate_size", 2880),
            bias=True,
            transposed=True,
            interleaved=True,
        ),
        names=NAMES,
    )
