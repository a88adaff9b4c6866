"""ERNIE 4.5, the dense size: Llama that rotates neighbouring channels.

Baidu ERNIE team 2025, https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf.
"""

from typing import Any

from quadriga.model_files.config.config_values import setting, with_defaults
from quadriga.model_files.config.decoder_config import DecoderConfig


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
