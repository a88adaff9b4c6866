"""Rotary frequencies of the scaling types of Hugging Face's `rope_parameters`.

Source: transformers 5, `modeling_rope_utils.py`. YaRN: Peng et al. 2023,
https://arxiv.org/abs/2309.00071; LongRoPE: Ding et al. 2024, https://arxiv.org/abs/2402.13753.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import setting
from quadriga.model_files.config.rope_config import RopeScaling


def rope_frequencies(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Return the frequencies and the attention factor for a served context.

    Args:
        scaling: Rotary positions of the checkpoint.
        context_length: Tokens of the longest sequence that the server computes.

    Returns:
        Frequencies [head_dim / 2] in radians per position, float32, and the number by which the
        cosines and sines are multiplied.

    Raises:
        ModelError: A value of `scaling` is missing or wrong, or the frequencies would depend on
            the length of each sequence.
    """
    return _TYPES[scaling.kind](scaling, context_length)


def _powers(scaling: RopeScaling) -> Tensor:
    """Return `rope_theta ** (2 i / head_dim)` as [head_dim / 2] float32."""
    # The device is named because the meta device, the default here, imports for a second.
    pairs = torch.arange(0, scaling.head_dim, 2, dtype=torch.int64, device="cpu").float()
    return float(scaling.parameters["rope_theta"]) ** (pairs / scaling.head_dim)


def _default(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(scaling), 1.0


def _linear(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(scaling) / scaling.number("factor"), 1.0


def _dynamic(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Return the unscaled frequencies, which hold up to `max_position_embeddings`."""
    if context_length > scaling.max_length:
        raise ModelError(
            f"the model's rope_type is 'dynamic', whose frequencies depend on the sequence's length"
            f" above {scaling.max_length} tokens, and the context is {context_length}; start with"
            f" --context-length {scaling.max_length}"
        )
    return 1.0 / _powers(scaling), 1.0


def _llama3(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    """Divide low frequencies by `factor`, keep high ones, interpolate between them."""
    frequencies = 1.0 / _powers(scaling)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    turns = scaling.original_length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.number("factor")), 1.0


def _yarn(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    """Divide low frequencies by `factor`, keep high ones, with a ramp over the pairs between."""
    factor = scaling.extension()
    low = _pair_with_turns(scaling, scaling.number("beta_fast", 32))
    high = _pair_with_turns(scaling, scaling.number("beta_slow", 1))
    if scaling.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, scaling.head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(scaling.head_dim // 2, device="cpu").float()
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    powers = _powers(scaling)
    frequencies = (1.0 / (factor * powers)) * (1 - kept) + (1.0 / powers) * kept
    return frequencies, _yarn_attention_factor(scaling, factor)


def _pair_with_turns(scaling: RopeScaling, num_turns: float) -> float:
    """Return the index of the pair that turns so often over the original context."""
    wavelength = scaling.original_length / (num_turns * 2 * math.pi)
    return scaling.head_dim * math.log(wavelength) / (2 * math.log(scaling.number("rope_theta")))


def _yarn_attention_factor(scaling: RopeScaling, factor: float) -> float:
    given = scaling.parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    numerator = scaling.parameters.get("mscale")
    denominator = scaling.parameters.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(float(numerator)) / magnitude(float(denominator))
    return magnitude(1.0)


def _longrope(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Divide by `long_factor` if the served context exceeds the original one.

    Keys in the cache keep the frequencies that they were written with, so one list serves all
    sequences.
    """
    original = scaling.original_length
    name = "long_factor" if context_length > original else "short_factor"
    divisors = torch.tensor(setting(scaling.parameters, name), dtype=torch.float32, device="cpu")
    if divisors.shape != _powers(scaling).shape:
        raise ModelError(
            f"the model's config.json has {len(divisors)} values in {name}; head_dim"
            f" {scaling.head_dim} needs {scaling.head_dim // 2}"
        )
    given, factor = scaling.parameters.get("attention_factor"), scaling.extension()
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (divisors * _powers(scaling)), float(given)


_TYPES: dict[str, Callable[[RopeScaling, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
