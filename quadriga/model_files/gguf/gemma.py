"""config.json of a Gemma 2 or Gemma 3 from the metadata of its GGUF.

A GGUF lacks some constants, for which llama.cpp's are taken (src/models/gemma2.cpp, gemma3.cpp).
"""

from collections.abc import Mapping
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.gguf.reader import TensorIndex

# Layers of the models of 27 billion weights, whose heads are smaller than hidden_size / heads.
NUM_LAYERS_27B = {"gemma2": 46, "gemma3": 62}


def gemma2_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    """Return the config of a Gemma 2: a window in every second layer, bounded scores.

    Raises:
        ModelError: Layers with and without a window have different rotary positions.
    """
    theta = values.get("rope.freq_base", 10000.0)
    if (local_theta := values.get("rope.freq_base_swa", theta)) != theta:
        raise ModelError(
            f"gemma2.rope.freq_base_swa = {local_theta} is not supported; supported: {theta}, which"
            " is gemma2.rope.freq_base"
        )
    return _shared("gemma2", values) | {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": values.get("attention.sliding_window", 4096),
        "layer_types": _layer_types(values, 2),
        # 0 stands for none.
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0) or None,
        "rope_theta": theta,
    }


def gemma3_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    """Return the config of a Gemma 3's text model: a window in five layers of six, or in none."""
    window = values.get("attention.sliding_window", 0)
    return _shared("gemma3", values) | {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _layer_types(values, 6 if window else 1),
        "final_logit_softcapping": values.get("final_logit_softcapping") or None,
        "rope_theta": values.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
    }


def _layer_types(values: Mapping[str, Any], period: int) -> list[str]:
    """Return which layers have a window: those of a list, or all but every `period`-th one."""
    num_layers = values["block_count"]
    pattern = values.get("attention.sliding_window_pattern", period)
    if period == 1:  # there is no window
        pattern = 1
    if not isinstance(pattern, list):
        pattern = [not pattern or bool((layer + 1) % pattern) for layer in range(num_layers)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _shared(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden_size = values["attention.head_count"], values["embedding_length"]
    head_dim = values.get("attention.key_length") or hidden_size // heads
    is_27b = values["block_count"] == NUM_LAYERS_27B[model_type]
    return {
        "model_type": model_type,
        "num_hidden_layers": values["block_count"],
        "hidden_size": hidden_size,
        "intermediate_size": values["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "query_pre_attn_scalar": hidden_size // heads if is_27b else head_dim,
        "rms_norm_eps": float(f"{values['attention.layer_norm_rms_epsilon']:.7g}"),
        "max_position_embeddings": values["context_length"],
        "hidden_activation": "gelu_pytorch_tanh",
    }
