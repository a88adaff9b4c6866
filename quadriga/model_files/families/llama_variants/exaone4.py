"""EXAONE 4.0: norms after attention and MLP, normalized heads, windows in most layers.

LG AI Research 2025, https://arxiv.org/abs/2507.11407.
"""

from typing import Any

from quadriga.model_files.config.config_values import head_dim_of, require, setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.layer_windows import layer_windows, periodic_types
from quadriga.model_files.config.rope_config import RopeScaling


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
