"""OLMo 2 and 3: norms after attention and MLP, queries and keys normalized over all heads.

OLMo team 2024, https://arxiv.org/abs/2501.00656; 2025, https://arxiv.org/abs/2512.13961.
"""

from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import head_dim_of, setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.layer_windows import FULL, SLIDING, layer_windows, periodic_types
from quadriga.model_files.config.rope_config import RopeScaling


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
    config = with_defaults(config, sliding_window=4096, rope_theta=500000.0)
    windows = layer_windows(config, periodic_types(config, 4))
    ropes = config.get("rope_parameters") or {FULL: config.get("rope_scaling"), SLIDING: None}
    if unknown := ropes.keys() - {FULL, SLIDING}:
        raise ModelError(
            f"the model's config.json has {', '.join(sorted(unknown))} in rope_parameters;"
            f" supported: {FULL} and {SLIDING}"
        )
    head_dim = head_dim_of(config)
    unscaled = config | {"rope_scaling": None}
    full, sliding = (
        RopeScaling.from_hf(unscaled | {"rope_parameters": ropes.get(kind)}, head_dim)
        for kind in (FULL, SLIDING)
    )
    return olmo2(
        config,
        windows=windows,
        ropes=tuple(full if window is None else sliding for window in windows),
    )
