"""What a request's sampling is where it does not say."""

import math
from typing import Any

import pytest

from quadriga.errors import ConfigError
from quadriga.sampling.params import NEUTRAL, SamplingDefaults, SamplingParams
from tokenizer_proc.preparation.prepare import sampling_defaults

GENERATION_CONFIG = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.05,
    "max_new_tokens": 2048,
}


def test_the_models_own_defaults_fill_what_a_request_leaves_open() -> None:
    defaults = sampling_defaults("model", GENERATION_CONFIG)
    assert defaults == SamplingDefaults(
        temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05
    )
    filled = SamplingParams(temperature=1.0, top_k=-1, min_p=0.1).filled(defaults)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (1.0, -1, 0.95, 0.1)
    assert filled.repetition_penalty == 1.05


@pytest.mark.parametrize(
    ("source", "config"), [("openai", GENERATION_CONFIG), ("model", {"eos_token_id": 2})]
)
def test_otherwise_they_are_openais(source: str, config: dict[str, Any]) -> None:
    assert sampling_defaults(source, config) == NEUTRAL
    filled = SamplingParams().filled(NEUTRAL)
    assert (filled.temperature, filled.top_k, filled.top_p, filled.min_p) == (1.0, -1, 1.0, 0.0)


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 3.0}, {"min_p": math.nan}])
def test_a_generation_config_that_cannot_be_used_says_what_to_do(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--sampling-defaults openai"):
        sampling_defaults("model", wrong)
