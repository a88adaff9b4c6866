"""Sampling parameters and grammars, with the checks of both."""

from quadriga.sampling.params import SamplingParams

__all__ = ["SamplingParams"]
