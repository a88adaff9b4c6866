"""OPT: learned positions from the third row on, LayerNorm before each block, ReLU.

Zhang et al. 2022, https://arxiv.org/abs/2205.01068.
"""

from typing import Any

from quadriga.model_files.config.config_values import require, setting
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of

POSITION_OFFSET = 2
NAMES = {
    "embedding": "embed_tokens",
    "positions": "embed_positions",
    "layers": "layers",
    "final_norm": "final_layer_norm",
    "attention_norm": "self_attn_layer_norm",
    "out": "self_attn.out_proj",
    "mlp_norm": "final_layer_norm",
    "up": "fc1",
    "down": "fc2",
}


def opt(config: dict[str, Any]) -> DecoderConfig:
    """Read an OPT's config.json; OPT-350M, whose norms come after the blocks, is refused."""
    require(config, "do_layer_norm_before", (True,))
    require(config, "_remove_final_layer_norm", (False,))
    require(config, "layer_norm_elementwise_affine", (True,))
    require(config, "word_embed_proj_dim", (setting(config, "hidden_size"), None))
    bias = setting(config, "enable_bias", True)
    return DecoderConfig.from_hf(
        config,
        intermediate_size=setting(config, "ffn_dim"),
        norm="layer",
        norm_eps=1e-5,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        activation=activation_of(config, "activation_function", "relu"),
        gated=False,
        ropes=(None,) * setting(config, "num_hidden_layers"),
        num_positions=setting(config, "max_position_embeddings") + POSITION_OFFSET,
        position_offset=POSITION_OFFSET,
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names=NAMES,
        removed=("model.decoder.", "decoder."),
    )
