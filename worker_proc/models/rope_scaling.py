"""Rotary frequencies of the scaling types of Hugging Face's `rope_parameters`.

Source: transformers 5, `modeling_rope_utils.py`. YaRN: Peng et al. 2023,
https://arxiv.org/abs/2309.00071; LongRoPE: Ding et al. 2024, https://arxiv.org/abs/2402.13753.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.models.base import setting

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary positions of a checkpoint.

    Attributes:
        head_dim: Channels of a head; all of them are rotated.
        max_length: `max_position_embeddings` in tokens; 0 if config.json has none.
        parameters: `rope_parameters` with `rope_type` and `rope_theta`.
    """

    head_dim: int
    max_length: int
    parameters: dict[str, Any]

    @classmethod
    def from_hf(cls, config: dict[str, Any], head_dim: int) -> "RopeScaling":
        """Read config.json, and compute the frequencies once to find missing values.

        Raises:
            ModelError: The type of scaling is unknown, or its values are missing or wrong.
        """
        parameters: dict[str, Any] = {"rope_theta": config.get("rope_theta") or DEFAULT_THETA}
        parameters |= config.get("rope_scaling") or {}
        parameters |= config.get("rope_parameters") or {}
        parameters["rope_type"] = parameters.get("rope_type") or parameters.get("type") or "default"
        max_length = int(config.get("max_position_embeddings") or 0)
        original = (
            config.get("original_max_position_embeddings")
            or parameters.get("original_max_position_embeddings")
            or max_length
        )
        parameters["original_max_position_embeddings"] = original or None
        rotated = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if rotated not in (None, 1.0):
            raise ModelError(
                f"the model's config.json has partial_rotary_factor = {rotated}; supported: 1.0"
            )
        if parameters["rope_type"] not in _TYPES:
            raise ModelError(
                f"the model's config.json has rope_type = {parameters['rope_type']!r}; supported: "
                + ", ".join(_TYPES)
            )
        scaling = cls(head_dim, max_length, parameters)
        scaling.frequencies(max_length)
        return scaling

    def frequencies(self, context_length: int) -> tuple[Tensor, float]:
        """Return the frequencies and the attention factor for a served context.

        Args:
            context_length: Tokens of the longest sequence that the server computes.

        Returns:
            Frequencies [head_dim / 2] in radians per position, float32, and the number by which
            the cosines and sines are multiplied.

        Raises:
            ModelError: A value of `parameters` is missing or wrong, or the frequencies would
                depend on the length of each sequence.
        """
        return _TYPES[self.parameters["rope_type"]](self, context_length)

    @property
    def powers(self) -> Tensor:
        """Return `rope_theta ** (2 i / head_dim)` as [head_dim / 2] float32."""
        # The device is named because the meta device, the default here, imports for a second.
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device="cpu").float()
        return float(self.parameters["rope_theta"]) ** (pairs / self.head_dim)

    @property
    def original_length(self) -> int:
        """Return the context length of the pretraining, in tokens."""
        return int(setting(self.parameters, "original_max_position_embeddings"))

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number of `parameters`, or `default` if it is missing or null."""
        return float(setting(self.parameters, name, default))

    def extension(self) -> float:
        """Return `factor`, or by how much the maximal context exceeds the original one."""
        return self.number("factor", self.max_length / self.original_length)


def _default(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    return 1.0 / scaling.powers, 1.0


def _linear(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    return 1.0 / scaling.powers / scaling.number("factor"), 1.0


def _dynamic(scaling: RopeScaling, context_length: int) -> tuple[Tensor, float]:
    """Return the unscaled frequencies, which hold up to `max_position_embeddings`."""
    if context_length > scaling.max_length:
        raise ModelError(
            f"the model's rope_type is 'dynamic', whose frequencies depend on the sequence's length"
            f" above {scaling.max_length} tokens, and the context is {context_length}; start with"
            f" --context-length {scaling.max_length}"
        )
    return 1.0 / scaling.powers, 1.0


def _llama3(scaling: RopeScaling, _: int) -> tuple[Tensor, float]:
    """Divide low frequencies by `factor`, keep high ones, interpolate between them."""
    frequencies = 1.0 / scaling.powers
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
    powers = scaling.powers
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
    if divisors.shape != scaling.powers.shape:
        raise ModelError(
            f"the model's config.json has {len(divisors)} values in {name}; head_dim"
            f" {scaling.head_dim} needs {scaling.head_dim // 2}"
        )
    given, factor = scaling.parameters.get("attention_factor"), scaling.extension()
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (divisors * scaling.powers), float(given)


_TYPES: dict[str, Callable[[RopeScaling, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
