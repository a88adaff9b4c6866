"""Sampling parameters and grammars, with their limits and checks."""

from quadriga.sampling.params import SamplingParams

__all__ = ["SamplingParams"]
