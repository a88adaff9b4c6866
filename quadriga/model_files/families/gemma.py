"""Gemma 2 and 3: norms before and after each part of a block, windows in turns.

Gemma team 2024, https://arxiv.org/abs/2408.00118: bounded scores and logits. Gemma team 2025,
https://arxiv.org/abs/2503.19786: normalized heads, and rotary positions of two kinds instead.
"""

from typing import Any

from quadriga.model_files.config.config_values import require, setting
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of
from quadriga.model_files.config.layer_windows import (
    DEFAULT_WINDOW,
    layer_windows,
    periodic_types,
)
from quadriga.model_files.config.rope_config import (
    DEFAULT_THETA,
    RopeScaling,
    configs_by_layer,
)
from quadriga.windows import Windows

NAMES = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma2(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 2's config.json."""
    windows = layer_windows(config, periodic_types(config, 2), DEFAULT_WINDOW)
    rope = RopeScaling.from_hf(config, _head_dim(config))
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} | config
    return _gemma(caps, windows, rope, rope, attention_softcap=caps["attn_logit_softcapping"])


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
        RopeScaling.from_hf(part, _head_dim(config)) for part in configs_by_layer(config, thetas)
    )
    return _gemma(
        config,
        layer_windows(config, types, DEFAULT_WINDOW),
        rope,
        local,
        qk_norm="heads",
        removed=("language_model.",),
        skipped_starts=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.",
                        "multi_modal_projector."),
    )  # fmt: skip


def _head_dim(config: dict[str, Any]) -> int:
    return int(setting(config, "head_dim", 256))


def _gemma(
    config: dict[str, Any],
    windows: Windows,
    rope: RopeScaling,
    local_rope: RopeScaling,
    **fields: Any,
) -> DecoderConfig:
    """Read what both have; `local_rope` is of the layers with a window."""
    require(config, "use_bidirectional_attention", (False, None))
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        head_dim=_head_dim(config),
        qkv_bias=bias,
        out_bias=bias,
        norm_offset=1.0,
        norm_places="around",
        activation=activation_of(config, "hidden_activation", "gelu_pytorch_tanh"),
        ropes=tuple(rope if window is None else local_rope for window in windows),
        windows=windows,
        attention_scale=float(setting(config, "query_pre_attn_scalar", 256)) ** -0.5,
        embedding_scale=float(setting(config, "hidden_size")) ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names=NAMES,
        **fields,
    )
