"""GPT-J: attention and MLP read one LayerNorm, and neighbouring channels are rotated.

Wang and Komatsuzaki 2021, https://github.com/kingoflolz/mesh-transformer-jax.
"""

from typing import Any

from quadriga.model_files.config.config_values import (
    GPT_ALIASES,
    BrokenConfig,
    setting,
    with_aliases,
)
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of
from quadriga.model_files.config.rope_config import RopeScaling

NAMES = {
    "embedding": "wte",
    "layers": "h",
    "final_norm": "ln_f",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_1",
    "q": "attn.q_proj",
    "k": "attn.k_proj",
    "v": "attn.v_proj",
    "out": "attn.out_proj",
    "up": "mlp.fc_in",
    "down": "mlp.fc_out",
}


def gptj(config: dict[str, Any]) -> DecoderConfig:
    """Read a GPT-J's config.json."""
    config = with_aliases(config, GPT_ALIASES)
    hidden_size, num_layers = setting(config, "n_embd"), setting(config, "n_layer")
    num_heads = setting(config, "n_head")
    rotated = config.get("rotary_dim", 64) or hidden_size // num_heads
    if rotated > hidden_size // num_heads:
        raise BrokenConfig(
            f"the model's config.json has rotary_dim = {rotated}; heads have"
            f" {hidden_size // num_heads} channels"
        )
    rope = RopeScaling.from_hf({"max_position_embeddings": setting(config, "n_positions")}, rotated)
    sizes = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }
    return DecoderConfig.from_hf(
        config | sizes,
        intermediate_size=setting(config, "n_inner", 4 * hidden_size),
        norm="layer",
        norm_eps=setting(config, "layer_norm_epsilon", 1e-5),
        parallel=True,
        mlp_bias=True,
        activation=activation_of(config, "activation_function", "gelu_new"),
        gated=False,
        ropes=(rope,) * num_layers,
        interleaved_rope=True,
        head_bias=True,
        names=NAMES,
        skipped=(".attn.bias", ".attn.masked_bias"),
        removed=("transformer.",),
    )
