"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, LongRoPE and, in some, windows.

Abdin et al. 2024, https://arxiv.org/abs/2404.14219.
"""

from typing import Any

from quadriga.model_files.config.config_values import head_dim_of, setting
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.rope_config import RopeScaling, rope_values

ORIGINAL_LENGTH = 4096  # where config.json has no original_max_position_embeddings
# Earlier config.json have these names for LongRoPE.
LONGROPE_NAMES = ("su", "yarn")


def phi3(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Phi-3, 3.5 or 4 with one dense MLP in each layer."""
    original = config.get("original_max_position_embeddings", ORIGINAL_LENGTH)
    values = rope_values(config) | {"original_max_position_embeddings": original}
    if (values.get("rope_type") or values.get("type")) in LONGROPE_NAMES:
        values["rope_type"] = "longrope"
    rope = RopeScaling.from_hf(
        config | {"rope_scaling": values}, head_dim_of(config), may_be_partial=True
    )
    return DecoderConfig.from_hf(
        config,
        ropes=(rope,) * setting(config, "num_hidden_layers"),
        norm_eps=setting(config, "rms_norm_eps", 1e-5),
        windows=(config.get("sliding_window"),) * setting(config, "num_hidden_layers"),
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    )
