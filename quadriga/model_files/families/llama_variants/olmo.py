"""OLMo 2 and 3: norms after attention and MLP, queries and keys normalized over all heads.

OLMo team 2024, https://arxiv.org/abs/2501.00656; 2025, https://arxiv.org/abs/2512.13961.
"""

from typing import Any

from quadriga.model_files.config.config_values import head_dim_of, setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.layer_windows import layer_windows, periodic_types
from quadriga.model_files.config.rope_config import RopeScaling, configs_by_layer

DEFAULT_THETA = 500000.0  # of an OLMo 3


def olmo2(config: dict[str, Any], **fields: Any) -> DecoderConfig:
    """Read an OLMo 2's config.json."""
    bias = setting(config, "attention_bias", False)
    return DecoderConfig.from_hf(
        with_defaults(config, rms_norm_eps=1e-5),
        norm_places="after",
        qk_norm="whole",
        qkv_bias=bias,
        out_bias=bias,
        **fields,
    )


def olmo3(config: dict[str, Any]) -> DecoderConfig:
    """Read an OLMo 3's config.json: every fourth layer has no window, and scaled positions."""
    config = with_defaults(config, sliding_window=4096)
    windows = layer_windows(config, periodic_types(config, 4))
    # As in transformers, `rope_theta` outside of `rope_parameters` is that of the other layers.
    thetas = (setting(config, "rope_theta", DEFAULT_THETA), DEFAULT_THETA)
    full, sliding = (
        RopeScaling.from_hf(part, head_dim_of(config)) for part in configs_by_layer(config, thetas)
    )
    return olmo2(
        config,
        windows=windows,
        ropes=tuple(full if window is None else sliding for window in windows),
    )
