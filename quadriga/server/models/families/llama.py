"""Llama and the families whose blocks are Llama's with other norms, biases, positions or windows.

RMSNorm, rotary positions, grouped-query attention, and a gated MLP or a mixture of experts: one
function for each model_type.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from quadriga.errors import ModelError
from quadriga.server.models.families.config_values import (
    EXPERTS_ALIASES,
    attention_biases,
    head_dim_of,
    require,
    setting,
    with_aliases,
    with_defaults,
)
from quadriga.server.models.families.decoder_config import (
    DEFAULT_THETA,
    NAMES,
    DecoderConfig,
    ExpertsConfig,
    RopeScaling,
    activation_of,
    configs_by_layer,
    rope_values,
)
from quadriga.server.models.families.windows import (
    DEFAULT_WINDOW,
    FULL,
    SLIDING,
    Windows,
    layer_windows,
    mistral_windows,
    periodic_types,
    qwen_windows,
)

# Llama and Mistral: RMSNorm, rotary positions, grouped-query attention, SwiGLU.
#
# Touvron et al. 2023, https://arxiv.org/abs/2302.13971; Jiang et al. 2023,
# https://arxiv.org/abs/2310.06825.


def llama(config: dict[str, Any]) -> DecoderConfig:
    """Read a Llama's config.json."""
    return DecoderConfig.from_hf(
        config,
        **attention_biases(config),
        mlp_bias=setting(config, "mlp_bias", False),
        skipped=(".rotary_emb.inv_freq",),
    )


def mistral(config: dict[str, Any]) -> DecoderConfig:
    """Read a Mistral's config.json; with `layer_types`, some layers may have no window."""
    num_layers = setting(config, "num_hidden_layers")
    windows = mistral_windows(config, num_layers)
    if config.get("layer_types"):
        windows = layer_windows(config, [], DEFAULT_WINDOW)
    return DecoderConfig.from_hf(config, windows=windows)


# Mixtral: Mistral with a mixture of experts in each layer.
#
# Jiang et al. 2024, https://arxiv.org/abs/2401.04088.

MIXTRAL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8}
MIXTRAL_NAMES = {
    "router": "block_sparse_moe.gate",
    "expert": "block_sparse_moe.experts.{}",
    "expert_gate": "w1",
    "expert_up": "w3",
    "expert_down": "w2",
}


def mixtral(config: dict[str, Any]) -> DecoderConfig:
    """Read a Mixtral's config.json."""
    config = with_aliases(config, EXPERTS_ALIASES)
    window = config.get("sliding_window")
    return DecoderConfig.from_hf(
        MIXTRAL_DEFAULTS | config,
        windows=(window,) * setting(config, "num_hidden_layers"),
        experts=ExpertsConfig(
            num_experts=setting(config, "num_local_experts", 8),
            num_chosen=setting(config, "num_experts_per_tok", 2),
            intermediate_size=setting(config, "intermediate_size"),
        ),
        names=MIXTRAL_NAMES,
    )


# Qwen 2 and 3: Llama with biased queries, keys and values, or with normalized heads.
#
# Yang et al. 2024, https://arxiv.org/abs/2407.10671; Yang et al. 2025,
# https://arxiv.org/abs/2505.09388.


def qwen2(config: dict[str, Any]) -> DecoderConfig:
    """Read a Qwen 2's config.json."""
    windows = qwen_windows(config, setting(config, "num_hidden_layers"))
    return DecoderConfig.from_hf(config, qkv_bias=True, windows=windows)


def qwen3(config: dict[str, Any]) -> DecoderConfig:
    """Read a Qwen 3's config.json."""
    return DecoderConfig.from_hf(
        config,
        qk_norm="heads",
        **attention_biases(config),
        windows=qwen_windows(config, setting(config, "num_hidden_layers")),
    )


# Qwen 3 with a mixture of experts in all layers or in some of them.
#
# Yang et al. 2025, https://arxiv.org/abs/2505.09388.


def qwen3_moe(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Qwen 3 with experts."""
    config = with_aliases(config, EXPERTS_ALIASES)
    num_layers = setting(config, "num_hidden_layers")
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if not config.get("use_sliding_window", False):
        window = None
    sparse_step, dense = setting(config, "decoder_sparse_step", 1), config.get("mlp_only_layers")
    experts = ExpertsConfig(
        num_experts=setting(config, "num_local_experts", 128),
        num_chosen=setting(config, "num_experts_per_tok", 8),
        intermediate_size=setting(config, "moe_intermediate_size", 768),
        renormalize=setting(config, "norm_topk_prob", False),
        dense_layers=frozenset(
            layer
            for layer in range(num_layers)
            if layer in (dense or ()) or (layer + 1) % sparse_step
        ),
    )
    return DecoderConfig.from_hf(
        {"num_key_value_heads": 4} | config,
        qk_norm="heads",
        **attention_biases(config),
        windows=(window,) * num_layers,
        experts=experts,
    )


# Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, LongRoPE and, in some, windows.
#
# Abdin et al. 2024, https://arxiv.org/abs/2404.14219.

PHI3_ORIGINAL_LENGTH = 4096  # where config.json has no original_max_position_embeddings
# Earlier config.json have these names for LongRoPE.
PHI3_LONGROPE_NAMES = ("su", "yarn")


def phi3(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Phi-3, 3.5 or 4 with one dense MLP in each layer."""
    original = config.get("original_max_position_embeddings", PHI3_ORIGINAL_LENGTH)
    values = rope_values(config) | {"original_max_position_embeddings": original}
    if (values.get("rope_type") or values.get("type")) in PHI3_LONGROPE_NAMES:
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


# GLM-4: half of each head is rotated, in neighbouring pairs; the 0414 models have post-norms.
#
# GLM Team 2024, https://arxiv.org/abs/2406.12793.

GLM_FUSED = {"gate_up": "mlp.gate_up_proj"}
GLM_POST_NORMS = {
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
        **{"names": GLM_FUSED} | fields,
    )


def glm4(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a GLM-4-0414 or GLM-Z1."""
    return glm(config, norm_places="around", names=GLM_FUSED | GLM_POST_NORMS)


# Gemma 1: Llama with GELU, scaled embeddings, and norms whose weights are stored minus 1.
#
# Gemma team 2024, https://arxiv.org/abs/2403.08295.


def gemma(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 1's config.json."""
    require(config, "use_bidirectional_attention", (False, None))
    config = with_defaults(
        config, num_key_value_heads=16, head_dim=256, hidden_act="gelu", tie_word_embeddings=True
    )
    activation = activation_of(config, "hidden_act")
    return DecoderConfig.from_hf(
        config,
        norm_offset=1.0,
        **attention_biases(config),
        # The first checkpoints name "gelu", and were trained with its approximation.
        activation="gelu_tanh" if activation == "gelu" else activation,
        embedding_scale=setting(config, "hidden_size") ** 0.5,
    )


# Gemma 2 and 3: norms before and after each part of a block, windows in turns.
#
# Gemma team 2024, https://arxiv.org/abs/2408.00118: bounded scores and logits. Gemma team 2025,
# https://arxiv.org/abs/2503.19786: normalized heads, and rotary positions of two kinds instead.

GEMMA_NAMES = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma2(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 2's config.json."""
    windows = layer_windows(config, periodic_types(config, 2), DEFAULT_WINDOW)
    rope = RopeScaling.from_hf(config, _gemma_head_dim(config))
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | config
    return _gemma_2_or_3(
        caps, windows, rope, rope, attention_softcap=caps["attn_logit_softcapping"]
    )


def gemma3(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Gemma 3's text model.

    Of a checkpoint that also reads images, the text model alone is loaded.
    """
    types = config.get("layer_types") or periodic_types(
        config, int(setting(config, "sliding_window_pattern", 6))
    )
    thetas = (
        float(setting(config, "rope_theta", 1e6)),
        float(setting(config, "rope_local_base_freq", DEFAULT_THETA)),
    )
    rope, local = (
        RopeScaling.from_hf(part, _gemma_head_dim(config))
        for part in configs_by_layer(config, thetas)
    )
    return _gemma_2_or_3(
        config,
        layer_windows(config, types, DEFAULT_WINDOW),
        rope,
        local,
        qk_norm="heads",
        removed=("language_model.",),
        skipped_starts=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.",
                        "multi_modal_projector."),
    )  # fmt: skip


def _gemma_head_dim(config: dict[str, Any]) -> int:
    return int(setting(config, "head_dim", 256))


def _gemma_2_or_3(
    config: dict[str, Any],
    windows: Windows,
    rope: RopeScaling,
    local_rope: RopeScaling,
    **fields: Any,
) -> DecoderConfig:
    """Read what both have; `local_rope` is of the layers with a window."""
    require(config, "use_bidirectional_attention", (False, None))
    return DecoderConfig.from_hf(
        config,
        head_dim=_gemma_head_dim(config),
        **attention_biases(config),
        norm_offset=1.0,
        norm_places="around",
        activation=activation_of(config, "hidden_activation", "gelu_pytorch_tanh"),
        ropes=tuple(rope if window is None else local_rope for window in windows),
        windows=windows,
        attention_scale=float(setting(config, "query_pre_attn_scalar", 256)) ** -0.5,
        embedding_scale=float(setting(config, "hidden_size")) ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names=GEMMA_NAMES,
        **fields,
    )


# Granite 3, dense sizes: Llama with factors of embeddings, scores, residuals and logits.
#
# Granite team 2024, https://github.com/ibm-granite/granite-3.0-language-models.


def granite(config: dict[str, Any]) -> DecoderConfig:
    """Read a Granite's config.json."""
    return DecoderConfig.from_hf(
        config,
        **attention_biases(config),
        mlp_bias=setting(config, "mlp_bias", False),
        attention_scale=setting(config, "attention_multiplier", 1.0),
        embedding_scale=setting(config, "embedding_multiplier", 1.0),
        residual_scale=setting(config, "residual_multiplier", 1.0),
        logit_scale=1.0 / setting(config, "logits_scaling", 1.0),
    )


# Granite with a mixture of experts: Llama with four scales, and stacked expert weights.
#
# IBM 2024, https://github.com/ibm-granite/granite-3.0-language-models.

GRANITEMOE_NAMES = {
    "router": "block_sparse_moe.router.layer",
    "expert": "block_sparse_moe.experts.{}",
    "experts_gate_up": "block_sparse_moe.input_linear",
    "experts_down": "block_sparse_moe.output_linear",
}


def granitemoe(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Granite with experts."""
    scale = config.get("attention_multiplier", 1.0)
    return DecoderConfig.from_hf(
        config,
        **attention_biases(config),
        attention_scale=head_dim_of(config) ** -0.5 if scale is None else float(scale),
        embedding_scale=float(setting(config, "embedding_multiplier", 1.0)),
        residual_scale=float(setting(config, "residual_multiplier", 1.0)),
        logit_scale=1 / float(setting(config, "logits_scaling", 1.0)),
        experts=ExpertsConfig(
            num_experts=setting(config, "num_local_experts", 8),
            num_chosen=setting(config, "num_experts_per_tok", 2),
            intermediate_size=setting(config, "intermediate_size"),
        ),
        names=GRANITEMOE_NAMES,
    )


# OLMo 2 and 3: norms after attention and MLP, queries and keys normalized over all heads.
#
# OLMo team 2024, https://arxiv.org/abs/2501.00656; 2025, https://arxiv.org/abs/2512.13961.

OLMO3_THETA = 500000.0  # of an OLMo 3


def olmo2(config: dict[str, Any], **fields: Any) -> DecoderConfig:
    """Read an OLMo 2's config.json."""
    return DecoderConfig.from_hf(
        with_defaults(config, rms_norm_eps=1e-5),
        norm_places="after",
        qk_norm="whole",
        **attention_biases(config),
        **fields,
    )


def olmo3(config: dict[str, Any]) -> DecoderConfig:
    """Read an OLMo 3's config.json: every fourth layer has no window, and scaled positions."""
    config = with_defaults(config, sliding_window=4096)
    windows = layer_windows(config, periodic_types(config, 4))
    # As in transformers, `rope_theta` outside of `rope_parameters` is that of the other layers.
    thetas = (setting(config, "rope_theta", OLMO3_THETA), OLMO3_THETA)
    full, sliding = (
        RopeScaling.from_hf(part, head_dim_of(config)) for part in configs_by_layer(config, thetas)
    )
    return olmo2(
        config,
        windows=windows,
        ropes=tuple(full if window is None else sliding for window in windows),
    )


# ERNIE 4.5, the dense size: Llama that rotates neighbouring channels.
#
# Baidu ERNIE team 2025, https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf.


def ernie4_5(config: dict[str, Any]) -> DecoderConfig:
    """Read an ERNIE 4.5's config.json."""
    bias = setting(config, "use_bias", False)
    defaults = {
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }
    return DecoderConfig.from_hf(
        {"head_dim": 128, **with_defaults(config, **defaults)},
        interleaved_rope=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
    )


# EXAONE 4.0: norms after attention and MLP, normalized heads, windows in most layers.
#
# LG AI Research 2025, https://arxiv.org/abs/2507.11407.


def exaone4(config: dict[str, Any]) -> DecoderConfig:
    """Read an EXAONE 4.0's config.json: where some layers have windows, the others rotate nothing.

    Without `sliding_window`, every layer sees all and rotates.
    """
    config = {"sliding_window": 4096, **config}
    config = with_defaults(config, num_key_value_heads=32, rms_norm_eps=1e-5)
    rope = RopeScaling.from_hf(config, head_dim_of(config))
    windows: tuple[int | None, ...] = (None,) * setting(config, "num_hidden_layers")
    ropes: tuple[RopeScaling | None, ...] = (rope,) * len(windows)
    if config["sliding_window"] is not None:
        types = config.get("layer_types")
        if not types:
            require(config, "sliding_window_pattern", (4, *range(1, len(windows) + 1)))
            types = periodic_types(config, config.get("sliding_window_pattern", 4))
        windows = layer_windows(config, types)
        ropes = tuple(rope if window is not None else None for window in windows)
    return DecoderConfig.from_hf(
        config, norm_places="after", qk_norm="heads", windows=windows, ropes=ropes
    )


# Helium: Llama that rotates neighbouring channels.
#
# Kyutai 2025, https://kyutai.org/2025/04/30/helium.html.


def helium(config: dict[str, Any]) -> DecoderConfig:
    """Read a Helium's config.json."""
    defaults = {
        "num_key_value_heads": 20,
        "head_dim": 128,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
    }
    return DecoderConfig.from_hf(
        with_defaults(config, **defaults),
        interleaved_rope=True,
        qkv_bias=setting(config, "attention_bias", False),
        mlp_bias=setting(config, "mlp_bias", False),
    )


# Seed-OSS: Llama with biased queries, keys and values.
#
# ByteDance Seed team 2025, https://github.com/ByteDance-Seed/seed-oss.


def seed_oss(config: dict[str, Any]) -> DecoderConfig:
    """Read a Seed-OSS's config.json."""
    config = with_defaults(config, num_key_value_heads=8)
    return DecoderConfig.from_hf(
        {"head_dim": 128, **config},
        qkv_bias=setting(config, "attention_bias", True),
        out_bias=setting(config, "attention_out_bias", False),
        mlp_bias=setting(config, "mlp_bias", False),
    )


# SmolLM3: Llama in which every fourth layer rotates nothing.
#
# Bakouch et al. 2025, https://huggingface.co/blog/smollm3; positions after Yang et al. 2025,
# https://arxiv.org/abs/2501.18795.


def smollm3(config: dict[str, Any]) -> DecoderConfig:
    """Read a SmolLM3's config.json: 1 in `no_rope_layers` is a layer that rotates."""
    config = with_defaults(
        config, num_key_value_heads=4, rope_theta=2000000.0, tie_word_embeddings=True
    )
    num_layers = setting(config, "num_hidden_layers")
    interval = setting(config, "no_rope_layer_interval", 4)
    rotates = config.get("no_rope_layers") or [
        number % interval for number in range(1, num_layers + 1)
    ]
    if len(rotates) < num_layers:
        raise ModelError(
            f"the model's config.json has {len(rotates)} values in no_rope_layers;"
            f" num_hidden_layers is {num_layers}"
        )
    rotates = rotates[:num_layers]
    has_windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
    types = [FULL if rotated or not has_windows else SLIDING for rotated in rotates]
    windows = layer_windows(config, types)
    rope = RopeScaling.from_hf(config, head_dim_of(config))
    return DecoderConfig.from_hf(
        config,
        **attention_biases(config),
        mlp_bias=setting(config, "mlp_bias", False),
        ropes=tuple(rope if rotated else None for rotated in rotates),
        windows=windows,
    )


# gpt-oss: experts with biases and a clamped gate, attention sinks, windows in every other layer.
#
# OpenAI 2025, https://arxiv.org/abs/2508.10925.

GPT_OSS_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS_NAMES = {
    "router": "mlp.router",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}


def gpt_oss(config: dict[str, Any]) -> DecoderConfig:
    """Read a gpt-oss's config.json."""
    config = with_aliases(config, EXPERTS_ALIASES)
    require(config, "hidden_act", ("silu",))
    require(config, "swiglu_alpha", (1.702,))
    require(config, "swiglu_limit", (7.0,))
    # An empty object means positions that are not scaled.
    if config.get("rope_parameters") is None and not config.get("rope_scaling"):
        config = config | {"rope_scaling": GPT_OSS_ROPE}
    return DecoderConfig.from_hf(
        GPT_OSS_DEFAULTS | config,
        **attention_biases(config, default=True),
        sinks=True,
        activation="clamped_swiglu",
        windows=layer_windows(config, periodic_types(config, 2), default_window=128),
        experts=ExpertsConfig(
            num_experts=setting(config, "num_local_experts", 128),
            num_chosen=setting(config, "num_experts_per_tok", 4),
            intermediate_size=setting(config, "intermediate_size", 2880),
            bias=True,
            transposed=True,
            interleaved=True,
        ),
        names=GPT_OSS_NAMES,
    )


# EmbeddingGemma: a Gemma 3 whose tokens see the whole text, or a window on either side.
#
# Vera et al. 2025, https://arxiv.org/abs/2509.20354.


def gemma3_text(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Gemma 3 that reads no images: it makes text or vectors."""
    require(config, "use_bidirectional_attention", (False, None, True))
    if not config.get("use_bidirectional_attention"):
        return gemma3(config)
    window = int(setting(config, "sliding_window", DEFAULT_WINDOW)) // 2 + 1
    read = gemma3(config | {"use_bidirectional_attention": False, "sliding_window": window})
    prefix = "model."
    names = {key: name.removeprefix(prefix) for key, name in (NAMES | dict(read.names)).items()}
    return replace(
        read,
        bidirectional=True,
        tie_word_embeddings=True,
        names=MappingProxyType(names),
        removed=(*read.removed, prefix),
        skipped_starts=(*read.skipped_starts, "lm_head."),
    )
