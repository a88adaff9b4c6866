"""What the GGUF of a variant of Llama has beside Llama's metadata, as values of config.json.

Source: llama.cpp's converter (conversion/gemma.py, granite.py and olmo.py).
"""

from collections.abc import Mapping
from typing import Any

from quadriga.errors import ModelError


def gemma_values(_: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation of a Gemma 1, which its GGUF does not name."""
    return {"hidden_act": "gelu_pytorch_tanh"}


def granite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of a Granite. Raise KeyError if one is missing."""
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    # GGUF stores float32.
    return {key: float(f"{values[name]:.7g}") for key, name in names.items()}


def olmo2_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nothing for an OLMo 2.

    Raises:
        ModelError: The model is an Olmo 3, whose GGUF has the same architecture.
    """
    if "attention.sliding_window" in values:
        raise ModelError(
            "the GGUF is of an Olmo 3 (olmo2.attention.sliding_window ="
            f" {values['attention.sliding_window']}), which is not supported in a GGUF; use the"
            " model's Hugging Face directory"
        )
    return {}
