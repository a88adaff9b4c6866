"""ModernBERT: an encoder with rotary positions, in which most layers see a window on either side.

Warner et al. 2024, https://arxiv.org/abs/2412.13663.
"""

from typing import Any

from quadriga.server.models.families.bert import encoder
from quadriga.server.models.families.config_values import head_dim_of, require, setting
from quadriga.server.models.families.decoder_config import (
    DEFAULT_THETA,
    DecoderConfig,
    RopeScaling,
    configs_by_layer,
)
from quadriga.server.models.families.windows import FULL, SLIDING, layer_windows

GLOBAL_THETA = 160_000.0
NAMES = {
    "embedding": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "layers": "layers",
    "attention_norm": "attn_norm",
    "qkv": "attn.Wqkv",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "out": "attn.Wo",
    "mlp_norm": "mlp_norm",
    "gate_up": "mlp.Wi",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.Wo",
    "final_norm": "final_norm",
}


def modernbert(config: dict[str, Any]) -> DecoderConfig:
    """Read a ModernBERT's config.json.

    The norm of the embeddings takes the place of that before the first layer's attention.
    """
    require(config, "rope_scaling", (None,))
    num_layers = int(setting(config, "num_hidden_layers", 22))
    period = int(setting(config, "global_attn_every_n_layers", 3))
    types = [SLIDING if number % period else FULL for number in range(num_layers)]
    half = int(setting(config, "local_attention", 128)) // 2
    windows = layer_windows(config | {"sliding_window": half + 1}, types)
    thetas = (
        float(setting(config, "global_rope_theta", GLOBAL_THETA)),
        float(setting(config, "local_rope_theta", DEFAULT_THETA)),
    )
    rope, local = (
        RopeScaling.from_hf(part, head_dim_of(config)) for part in configs_by_layer(config, thetas)
    )
    has_bias = setting(config, "attention_bias", False)
    names = {
        "hidden_act": setting(config, "hidden_activation", "gelu"),
        "layer_norm_eps": setting(config, "norm_eps", 1e-5),
        "type_vocab_size": 0,
    }
    return encoder(
        config | names,
        NAMES,
        ("model.",),
        norm_places="before",
        norm_bias=setting(config, "norm_bias", False),
        first_norm=False,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=setting(config, "mlp_bias", False),
        gated=True,
        ropes=tuple(rope if window is None else local for window in windows),
        windows=windows,
        num_positions=0,
    )
