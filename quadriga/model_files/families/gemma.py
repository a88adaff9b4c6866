"""Gemma 2 and the text model of Gemma 3: norms on both sides of attention and MLP, windows.

Gemma team 2024, https://arxiv.org/abs/2408.00118; 2025, https://arxiv.org/abs/2503.19786.
Checkpoints store the weights of norms minus 1.
"""

from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import require, setting
from quadriga.model_files.config.decoder_config import DecoderConfig, activation_of
from quadriga.model_files.config.rope_config import RopeScaling
from quadriga.windows import Windows

DEFAULT_HEAD_DIM, DEFAULT_SCALAR, DEFAULT_WINDOW = 256, 256, 4096
DEFAULT_THETA, DEFAULT_LOCAL_THETA = 1000000.0, 10000.0
FULL, SLIDING = "full_attention", "sliding_attention"
# Of a checkpoint that also reads images, which is served without them.
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.")
_WRAPPER = "language_model."


def gemma2(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 2's config.json: bounded scores and logits, a window in every second layer."""
    return _gemma(config, _windows(config, period=2))


def gemma3(config: dict[str, Any]) -> DecoderConfig:
    """Read a Gemma 3's config.json: normalised heads, a window in five layers of six.

    Layers with a window have rotary positions of another base, which are not scaled.
    """
    windows = _windows(config, period=setting(config, "sliding_window_pattern", 6))
    ropes = config.get("rope_parameters") or {}
    theta = {"rope_theta": DEFAULT_THETA if (given := config.get("rope_theta")) is None else given}
    whole = {**config, **theta, "rope_parameters": ropes.get(FULL, ropes)}
    local = {
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rope_theta": setting(config, "rope_local_base_freq", DEFAULT_LOCAL_THETA),
        "rope_parameters": ropes.get(SLIDING),
    }
    head_dim = setting(config, "head_dim", DEFAULT_HEAD_DIM)
    of_full, of_sliding = (RopeScaling.from_hf(part, head_dim) for part in (whole, local))
    return _gemma(
        config,
        windows,
        qk_norm="heads",
        ropes=tuple(of_full if window is None else of_sliding for window in windows),
        removed=(_WRAPPER,),
        foreign=(*_IMAGE_PARTS, *(f"model.{part}" for part in _IMAGE_PARTS)),
    )


def _gemma(config: dict[str, Any], windows: Windows, **fields: Any) -> DecoderConfig:
    require(config, "use_bidirectional_attention", (False, None))
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        config,
        head_dim=setting(config, "head_dim", DEFAULT_HEAD_DIM),
        norm_offset=1.0,
        norm_places="around",
        qkv_bias=bias,
        out_bias=bias,
        activation=activation_of(config, "hidden_activation", "gelu_pytorch_tanh"),
        windows=windows,
        attention_scale=setting(config, "query_pre_attn_scalar", DEFAULT_SCALAR) ** -0.5,
        attention_softcap=config.get("attn_logit_softcapping"),
        embedding_scale=setting(config, "hidden_size") ** 0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        tie_word_embeddings=setting(config, "tie_word_embeddings", True),
        names={"mlp_norm": "pre_feedforward_layernorm"},
        **fields,
    )


def _windows(config: dict[str, Any], period: int) -> Windows:
    """Return the window of each layer; by default every `period`-th layer has none."""
    num_layers = setting(config, "num_hidden_layers")
    kinds = config.get("layer_types") or [
        FULL if layer % period == 0 else SLIDING for layer in range(1, num_layers + 1)
    ]
    if len(kinds) != num_layers or set(kinds) - {FULL, SLIDING}:
        raise ModelError(
            f"the model's config.json has layer_types = {kinds}; supported: {FULL} or {SLIDING}"
            f" for each of the {num_layers} layers"
        )
    window = int(setting(config, "sliding_window", DEFAULT_WINDOW))
    return tuple(window if kind == SLIDING else None for kind in kinds)
