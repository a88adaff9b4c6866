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
    """Return the factors of a Granite. Raise KeyError without the one of the logits.

    Raises:
        ModelError: Nothing is rotated.
    """
    if not values.get("rope.scaling.finetuned", True):
        raise ModelError(
            "granite.rope.scaling.finetuned = False, a model that rotates nothing, is not"
            " supported in a GGUF; supported: True"
        )
    head_dim = values.get("attention.key_length") or (
        values["embedding_length"] // values["attention.head_count"]
    )
    factors = {
        "attention_multiplier": values.get("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": values.get("embedding_scale") or 1.0,
        "residual_multiplier": values.get("residual_scale") or 1.0,
        "logits_scaling": values["logit_scale"],
    }
    # GGUF stores float32.
    return {key: float(f"{value:.7g}") for key, value in factors.items()}


def olmo2_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nothing for an OLMo 2.

    Raises:
        ModelError: The model is an Olmo 3, whose GGUF has the same architecture.
    """
    if values.get("attention.sliding_window", 0):
        raise ModelError(
            "the GGUF is of an Olmo 3 (olmo2.attention.sliding_window ="
            f" {values['attention.sliding_window']}), which is not supported in a GGUF; use the"
            " model's Hugging Face directory"
        )
    return {}
