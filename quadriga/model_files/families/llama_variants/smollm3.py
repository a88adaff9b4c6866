"""SmolLM3: Llama in which every fourth layer rotates nothing.

Bakouch et al. 2025, https://huggingface.co/blog/smollm3; positions after Yang et al. 2025,
https://arxiv.org/abs/2501.18795.
"""

from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import head_dim_of, setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.layer_windows import FULL, SLIDING, layer_windows
from quadriga.model_files.config.rope_config import RopeScaling


def smollm3(config: dict[str, Any]) -> DecoderConfig:
    """Read a SmolLM3's config.json: 1 in `no_rope_layers` stands for a layer that rotates."""
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
    bias = setting(config, "attention_bias", False)
    rope = RopeScaling.from_hf(config, head_dim_of(config))
    return DecoderConfig.from_hf(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=setting(config, "mlp_bias", False),
        ropes=tuple(rope if rotated else None for rotated in rotates),
        windows=windows,
    )
