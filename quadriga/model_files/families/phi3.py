"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, LongRoPE and, in some, windows.

Abdin et al. 2024, https://arxiv.org/abs/2404.14219.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting
from quadriga.model_files.config.decoder_config import DecoderConfig

ORIGINAL_LENGTH = 4096  # where config.json has no original_max_position_embeddings
# Earlier config.json have these names for LongRoPE.
LONGROPE_NAMES = ("su", "yarn")


def phi3(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Phi-3, 3.5 or 4 with one dense MLP in each layer."""
    config = {"original_max_position_embeddings": ORIGINAL_LENGTH, **config}
    for key in ("rope_scaling", "rope_parameters"):
        rope = dict(config.get(key) or {})
        if (rope.get("rope_type") or rope.get("type")) in LONGROPE_NAMES:
            rope["rope_type"] = "longrope"
        config[key] = rope
    return DecoderConfig.from_hf(
        config,
        norm_eps=setting(config, "rms_norm_eps", 1e-5),
        windows=(config.get("sliding_window"),) * setting(config, "num_hidden_layers"),
        names={"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
    )
