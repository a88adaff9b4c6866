"""GPT-NeoX and Pythia: attention and MLP in parallel, LayerNorm, a quarter of a head is rotated.

Black et al. 2022, https://arxiv.org/abs/2204.06745; Biderman et al. 2023,
https://arxiv.org/abs/2304.01373.
"""

from typing import Any

from quadriga.model_files.config.config_values import head_dim_of, setting
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of
from quadriga.model_files.config.rope_config import RopeScaling

NAMES = {
    "embedding": "embed_in",
    "layers": "layers",
    "final_norm": "final_layer_norm",
    "head": "embed_out",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def gpt_neox(config: dict[str, Any]) -> DecoderConfig:
    """Read a GPT-NeoX's config.json."""
    names = {
        "rope_theta": setting(config, "rotary_emb_base", 10000.0),
        "partial_rotary_factor": setting(config, "rotary_pct", 0.25),
    }
    rope = RopeScaling.from_hf(config | names, head_dim_of(config), may_be_partial=True)
    bias = setting(config, "attention_bias", True)
    return DecoderConfig.from_hf(
        config,
        ropes=(rope,) * setting(config, "num_hidden_layers"),
        norm="layer",
        norm_eps=setting(config, "layer_norm_eps", 1e-5),
        parallel=setting(config, "use_parallel_residual", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        activation=activation_of(config, "hidden_act", "gelu"),
        gated=False,
        names=NAMES,
        qkv_by_head=True,
        skipped=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        removed=("gpt_neox.",),
    )
