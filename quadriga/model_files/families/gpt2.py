"""GPT-2: learned positions, LayerNorm before each block, fused QKV, GELU.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from typing import Any

from quadriga.model_files.config.config_values import GPT_ALIASES, require, setting, with_aliases
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of

NAMES = {
    "embedding": "wte",
    "positions": "wpe",
    "layers": "h",
    "final_norm": "ln_f",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def gpt2(config: dict[str, Any]) -> DecoderConfig:
    """Read a GPT-2's config.json."""
    require(config, "scale_attn_weights", (True,))
    require(config, "scale_attn_by_inverse_layer_idx", (False, None))
    require(config, "add_cross_attention", (False, None))
    config = with_aliases(config, GPT_ALIASES)
    hidden_size, num_layers = setting(config, "n_embd"), setting(config, "n_layer")
    sizes = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": setting(config, "n_head"),
    }
    return DecoderConfig.from_hf(
        config | sizes,
        intermediate_size=setting(config, "n_inner", 4 * hidden_size),
        norm="layer",
        norm_eps=setting(config, "layer_norm_epsilon", 1e-5),
        activation=activation_of(config, "activation_function", "gelu_new"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        ropes=(None,) * num_layers,
        num_positions=setting(config, "n_positions"),
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names=NAMES,
        transposed=True,
        skipped=(".attn.bias", ".attn.masked_bias"),
        removed=("transformer.",),
    )
