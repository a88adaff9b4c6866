"""Rotary positions in a GGUF as Hugging Face's `rope_scaling`.

Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's use of keys and tensors.
"""

import math
from collections.abc import Mapping
from typing import Any

from quadriga.errors import ModelError

# Tensors of constants [head_dim / 2] by which frequencies are divided; they are not weights.
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
ROPE_TENSORS = frozenset((ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS))

_TYPES = ("none", "linear", "yarn", "longrope")


def rope_scaling(values: Mapping[str, Any], divisors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the part of config.json that describes scaled positions; empty if there are none.

    Args:
        values: Metadata without the architecture's prefix.
        divisors: The values of those of ROPE_TENSORS that the file has.

    Raises:
        ModelError: The scaling is unknown or incomplete.
    """
    # Without a type, a factor is linear.
    kind = values.get("rope.scaling.type", "linear")
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
    factor = 1.0 if kind == "none" else _factor(values)
    attention_factor = float(values.get("rope.scaling.attn_factor") or 1.0)
    if kind == "yarn":
        parameters = _yarn(values, divisors, factor, attention_factor)
    elif kind == "longrope" or LONG_FACTORS in divisors or SHORT_FACTORS in divisors:
        parameters = _longrope(divisors, factor, attention_factor)
    elif ROPE_FREQS in divisors or attention_factor != 1.0:
        # The same divisors for every context.
        divided = divisors.get(ROPE_FREQS) or [1.0] * (_num_rotated(values) // 2)
        parameters = _longrope(
            {SHORT_FACTORS: divided, LONG_FACTORS: divided}, factor, attention_factor
        )
    elif factor != 1.0:
        parameters = {"rope_type": "linear", "factor": factor}
    else:
        return {}
    context = values["context_length"]
    original = values.get("rope.scaling.original_context_length") or context
    return {"rope_scaling": {"original_max_position_embeddings": original, **parameters}}


def _factor(values: Mapping[str, Any]) -> float:
    """Return the number by which positions are divided, of which an older key is the other name."""
    key = "rope.scaling.factor"
    if key not in values:
        key = "rope.scale_linear"
    factor = _decimal(values.get(key) or 1.0)
    if not factor > 0 or not math.isfinite(factor):
        raise ModelError(f"{key} = {factor} is not supported; supported: numbers above 0")
    return factor


def _num_rotated(values: Mapping[str, Any]) -> int:
    head_dim = values["embedding_length"] // values["attention.head_count"]
    return int(values.get("rope.dimension_count") or values.get("attention.key_length") or head_dim)


def _yarn(
    values: Mapping[str, Any],
    divisors: Mapping[str, list[float]],
    factor: float,
    attention_factor: float,
) -> dict[str, Any]:
    if divisors:
        raise ModelError(
            f"rope.scaling.type = 'yarn' is not supported together with {', '.join(divisors)}"
        )
    parameters: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        parameters[name] = values.get(f"rope.scaling.yarn_{name}")
    if attention_factor != 1.0:
        # It multiplies YaRN's own factor.
        own = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        parameters["attention_factor"] = own * attention_factor
    return parameters


def _longrope(
    divisors: Mapping[str, list[float]], factor: float, attention_factor: float
) -> dict[str, Any]:
    """Return divisors for short and long contexts; `factor` divides all frequencies as well."""
    for name in (LONG_FACTORS, SHORT_FACTORS):
        if name not in divisors:
            raise ModelError(
                "rope.scaling.type is 'longrope', or the file has some of its factors, but there"
                f" is no {name}"
            )
    if ROPE_FREQS in divisors:
        raise ModelError(f"{ROPE_FREQS} is not supported together with {LONG_FACTORS}")
    return {
        "rope_type": "longrope",
        "short_factor": [factor * divisor for divisor in divisors[SHORT_FACTORS]],
        "long_factor": [factor * divisor for divisor in divisors[LONG_FACTORS]],
        "attention_factor": attention_factor,
    }


def _decimal(value: float) -> float:
    """Return the decimal number of a float32."""
    return float(f"{value:.7g}")
