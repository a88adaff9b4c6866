"""Rotary scaling in a GGUF as Hugging Face's `rope_parameters`.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's use of the tensors.
"""

from collections.abc import Mapping
from typing import Any

from quadriga.errors import ModelError

# Tensors of constants [head_dim / 2] by which frequencies are divided; they are not weights.
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
ROPE_TENSORS = frozenset((ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS))

_TYPES = ("none", "linear", "yarn", "longrope")


def rope_parameters(
    values: Mapping[str, Any], divisors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Return the part of config.json that describes scaled positions; empty if there are none.

    Args:
        values: Metadata without the architecture's prefix.
        divisors: The values of those of ROPE_TENSORS that the file has.

    Raises:
        ModelError: The scaling is unknown or incomplete.
    """
    kind = values.get("rope.scaling.type", "none")
    if kind not in _TYPES:
        raise ModelError(
            f"rope.scaling.type = {kind!r} is not supported; supported: {', '.join(_TYPES)}"
        )
    for name, neutral in (
        ("yarn_log_multiplier", 0),
        ("yarn_ext_factor", 1),
        ("yarn_attn_factor", 1),
    ):
        if values.get(f"rope.scaling.{name}", neutral) != neutral:
            raise ModelError(f"rope.scaling.{name} is not supported")
    context = values["context_length"]
    original = values.get("rope.scaling.original_context_length") or context
    parameters: dict[str, Any] = {"original_max_position_embeddings": original}
    factor = values.get("rope.scaling.factor") or 1.0
    # The converter writes no type for a Phi-3 with these factors.
    if kind == "longrope" or (kind == "none" and LONG_FACTORS in divisors):
        parameters |= _longrope(values, divisors, factor)
    elif divisors:
        parameters |= _divided(kind, divisors)
    elif kind == "none":
        return {}
    else:
        parameters |= {"rope_type": kind, "factor": factor}
        for name in ("beta_fast", "beta_slow"):
            parameters[name] = values.get(f"rope.scaling.yarn_{name}")
    return {"rope_parameters": parameters}


def _divided(kind: str, divisors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the scaling of Llama 3.1, whose divisors are the same for every context."""
    if kind != "none" or list(divisors) != [ROPE_FREQS]:
        raise ModelError(
            f"rope.scaling.type = {kind!r} is not supported together with {', '.join(divisors)}"
        )
    factors = divisors[ROPE_FREQS]
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
    }


def _longrope(
    values: Mapping[str, Any], divisors: Mapping[str, list[float]], factor: float
) -> dict[str, Any]:
    if factor != 1.0:
        raise ModelError(f"rope.scaling.factor = {factor} is not supported with longrope")
    for name in (LONG_FACTORS, SHORT_FACTORS):
        if name not in divisors:
            raise ModelError(f"rope.scaling.type is 'longrope', but there is no {name}")
    return {
        "rope_type": "longrope",
        "short_factor": divisors[SHORT_FACTORS],
        "long_factor": divisors[LONG_FACTORS],
        "attention_factor": values.get("rope.scaling.attn_factor") or 1.0,
    }
