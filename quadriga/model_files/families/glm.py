"""GLM-4: half of each head is rotated, in neighbouring pairs; the 0414 models have post-norms.

GLM Team 2024, https://arxiv.org/abs/2406.12793.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.rope_config import RopeScaling

FUSED = {"gate_up": "mlp.gate_up_proj"}
POST_NORMS = {
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def glm(config: dict[str, Any], **fields: Any) -> DecoderConfig:
    """Read the config.json of a GLM-4; `fields` are what a later model changes."""
    config = {"partial_rotary_factor": 0.5, **config}
    head_dim = setting(config, "head_dim", 128)
    rope = RopeScaling.from_hf(config, head_dim, may_be_partial=True)
    return DecoderConfig.from_hf(
        config,
        head_dim=head_dim,
        ropes=(rope,) * setting(config, "num_hidden_layers"),
        norm_eps=setting(config, "rms_norm_eps", 1.5625e-07),
        qkv_bias=setting(config, "attention_bias", True),
        interleaved_rope=True,
        **{"names": FUSED} | fields,
    )


def glm4(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a GLM-4-0414 or GLM-Z1."""
    return glm(config, norm_places="around", names=FUSED | POST_NORMS)
