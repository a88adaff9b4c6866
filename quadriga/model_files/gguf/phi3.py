"""config.json of a Phi-3, 3.5 or 4 from the metadata of its GGUF."""

from collections.abc import Mapping
from typing import Any

from quadriga.model_files.gguf.reader import TensorIndex


def phi3_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    """Return the config; a window of 0 tokens stands for none."""
    heads, hidden_size = values["attention.head_count"], values["embedding_length"]
    head_dim = values.get("attention.key_length", hidden_size // heads)
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "num_hidden_layers": values["block_count"],
        "hidden_size": hidden_size,
        "intermediate_size": values["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "partial_rotary_factor": values.get("rope.dimension_count", head_dim) / head_dim,
        "rope_theta": float(f"{values.get('rope.freq_base', 10000.0):.7g}"),
        "rms_norm_eps": float(f"{values['attention.layer_norm_rms_epsilon']:.7g}"),
        "max_position_embeddings": values["context_length"],
        "original_max_position_embeddings": (
            values.get("rope.scaling.original_context_length") or values["context_length"]
        ),
        "sliding_window": values.get("attention.sliding_window") or None,
        "hidden_act": "silu",
    }
