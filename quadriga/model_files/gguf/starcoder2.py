"""config.json of a StarCoder2 from the metadata of its GGUF."""

from collections.abc import Mapping
from typing import Any

from quadriga.model_files.gguf.reader import TensorIndex

WINDOW = 4096  # tokens; the same in all published sizes, and not in a GGUF


def starcoder2_config(values: Mapping[str, Any], tensors: TensorIndex) -> dict[str, Any]:
    """Return the config of a StarCoder2."""
    heads = values["attention.head_count"]
    return {
        "model_type": "starcoder2",
        "architectures": ["Starcoder2ForCausalLM"],
        "num_hidden_layers": values["block_count"],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "rope_theta": float(f"{values.get('rope.freq_base', 10000.0):.7g}"),
        "norm_epsilon": float(f"{values['attention.layer_norm_epsilon']:.7g}"),
        "max_position_embeddings": values["context_length"],
        "sliding_window": values.get("attention.sliding_window", WINDOW),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in tensors,
    }
