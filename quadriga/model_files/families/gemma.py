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
from quadriga.model_files.config.rope_config import DEFAULT_THETA, RopeScaling

NAMES = {
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma2(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 2's config.json."""
    return _gemma(config, 2, theta=DEFAULT_THETA, local_theta=None)


def gemma3(config: dict[str, Any]) -> DecoderConfig:
    """Read the config.json of a Gemma 3's text model.

    Of a checkpoint that also reads images, the text model alone is loaded.
    """
    return _gemma(
        config,
        6,
        theta=1e6,
        local_theta=float(setting(config, "rope_local_base_freq", DEFAULT_THETA)),
        qk_norm="heads",
        removed=("language_model.",),
        skipped_starts=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.",
                        "multi_modal_projector."),
    )  # fmt: skip


def _gemma(
    config: dict[str, Any], period: int, theta: float, local_theta: float | None, **fields: Any
) -> DecoderConfig:
    """Read what both have. `period`: every so many layers, one sees all tokens."""
    require(config, "use_bidirectional_attention", (False, None))
    require(config, "tie_word_embeddings", (True, None))
    head_dim = setting(config, "head_dim", 256)
    period = int(setting(config, "sliding_window_pattern", period))
    windows = layer_windows(config, periodic_types(config, period), DEFAULT_WINDOW)
    ropes = config.get("rope_parameters") or {}
    whole = {"rope_theta": theta} | config | {"rope_parameters": ropes.get("full_attention", ropes)}
    rope = local = RopeScaling.from_hf(whole, head_dim)
    if local_theta is not None:
        parameters = {"rope_theta": local_theta} | (ropes.get("sliding_attention") or {})
        local = RopeScaling.from_hf({"rope_parameters": parameters}, head_dim)
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        norm_offset=1.0,
        norm_places="around",
        activation=activation_of(config, "hidden_activation", "gelu_pytorch_tanh"),
        ropes=tuple(rope if window is None else local for window in windows),
        windows=windows,
        attention_scale=float(setting(config, "query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping"),
        embedding_scale=float(setting(config, "hidden_size")) ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        tie_word_embeddings=True,
        names=NAMES,
        **fields,
    )
