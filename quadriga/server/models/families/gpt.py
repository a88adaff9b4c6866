"""GPT-2 and the families with its LayerNorm: GPT-J, GPT-NeoX and Pythia, OPT, StarCoder2.

One function for each model_type, and the sizes of GPT-2, for which --load-format dummy needs no
files.
"""

from typing import Any, NamedTuple

from quadriga.server.models.families.config_values import (
    GPT_ALIASES,
    BrokenConfig,
    attention_biases,
    head_dim_of,
    require,
    setting,
    with_aliases,
)
from quadriga.server.models.families.decoder_config import DecoderConfig, RopeScaling, activation_of

# GPT-2: learned positions, LayerNorm before each block, fused QKV, GELU.
#
# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

GPT2_NAMES = {
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
        names=GPT2_NAMES,
        transposed=True,
        skipped=(".attn.bias", ".attn.masked_bias"),
        removed=("transformer.",),
    )


# GPT-J: attention and MLP read one LayerNorm, and neighbouring channels are rotated.
#
# Wang and Komatsuzaki 2021, https://github.com/kingoflolz/mesh-transformer-jax.

GPTJ_NAMES = {
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
        names=GPTJ_NAMES,
        skipped=(".attn.bias", ".attn.masked_bias"),
        removed=("transformer.",),
    )


# GPT-NeoX and Pythia: attention and MLP in parallel, LayerNorm, a quarter of a head is rotated.
#
# Black et al. 2022, https://arxiv.org/abs/2204.06745; Biderman et al. 2023,
# https://arxiv.org/abs/2304.01373.

GPT_NEOX_NAMES = {
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
    return DecoderConfig.from_hf(
        config,
        ropes=(rope,) * setting(config, "num_hidden_layers"),
        norm="layer",
        norm_eps=setting(config, "layer_norm_eps", 1e-5),
        parallel=setting(config, "use_parallel_residual", True),
        **attention_biases(config, default=True),
        mlp_bias=True,
        activation=activation_of(config, "hidden_act", "gelu"),
        gated=False,
        names=GPT_NEOX_NAMES,
        qkv_by_head=True,
        skipped=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        removed=("gpt_neox.",),
    )


# OPT: learned positions from the third row on, LayerNorm before each block, ReLU.
#
# Zhang et al. 2022, https://arxiv.org/abs/2205.01068.

OPT_POSITION_OFFSET = 2
OPT_NAMES = {
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
        num_positions=setting(config, "max_position_embeddings") + OPT_POSITION_OFFSET,
        position_offset=OPT_POSITION_OFFSET,
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names=OPT_NAMES,
        removed=("model.decoder.", "decoder."),
    )


# StarCoder2: rotary positions, grouped-query attention, LayerNorm, biases, GELU.
#
# Lozhkov et al. 2024, https://arxiv.org/abs/2402.19173.

STARCODER2_NAMES = {"up": "mlp.c_fc", "down": "mlp.c_proj"}


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
        names=STARCODER2_NAMES,
    )


# Architectures of the GPT-2 family, so that --load-format dummy needs no files.
#
# Source of the numbers: Radford et al., "Language Models are Unsupervised Multitask Learners"
# (2019), table 2; for distilgpt2, Sanh et al., "DistilBERT" (2019).


class Gpt2Size(NamedTuple):
    """One size, with the Hub id of its weights."""

    hub_id: str
    num_layers: int
    hidden_size: int
    num_heads: int


GPT2_SIZES = {
    "gpt2": Gpt2Size("openai-community/gpt2", 12, 768, 12),
    "gpt2-medium": Gpt2Size("openai-community/gpt2-medium", 24, 1024, 16),
    "gpt2-large": Gpt2Size("openai-community/gpt2-large", 36, 1280, 20),
    "gpt2-xl": Gpt2Size("openai-community/gpt2-xl", 48, 1600, 25),
    "distilgpt2": Gpt2Size("distilbert/distilgpt2", 6, 768, 12),
}
GPT2_END_OF_TEXT_ID = 50256


def find_gpt2_size(model: str) -> Gpt2Size | None:
    """Return the size of a model name, with or without its organization; None if it is another."""
    by_hub_id = {size.hub_id: size for size in GPT2_SIZES.values()}
    return GPT2_SIZES.get(model) or by_hub_id.get(model)


def gpt2_config_json(size: Gpt2Size) -> dict[str, Any]:
    """Return the contents of config.json for a size."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": size.num_layers,
        "n_embd": size.hidden_size,
        "n_head": size.num_heads,
        "n_inner": None,
        "n_positions": 1024,
        "n_ctx": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": GPT2_END_OF_TEXT_ID,
        "eos_token_id": GPT2_END_OF_TEXT_ID,
    }
