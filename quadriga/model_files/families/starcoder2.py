"""StarCoder2: rotary positions, grouped-query attention, LayerNorm, biases, GELU.

Lozhkov et al. 2024, https://arxiv.org/abs/2402.19173.
"""

from typing import Any

from quadriga.model_files.config.config_values import require, setting
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of

NAMES = {"up": "mlp.c_fc", "down": "mlp.c_proj"}


def starcoder2(config: dict[str, Any]) -> DecoderConfig:
    """Read a StarCoder2's config.json."""
    require(config, "norm_type", ("layer_norm",))
    require(config, "mlp_type", ("default",))
    bias = setting(config, "use_bias", True)
    return DecoderConfig.from_hf(
        config,
        norm="layer",
        norm_eps=setting(config, "norm_epsilon", 1e-5),
        windows=(config.get("sliding_window"),) * setting(config, "num_hidden_layers"),
        activation=activation_of(config, "hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names=NAMES,
    )
