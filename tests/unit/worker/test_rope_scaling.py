"""Scaled rotary positions against transformers: the same greedy tokens, on both CPU engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quadriga.errors import ModelError
from quadriga.server.models.families.decoder_config import RopeScaling
from tests.references import greedy_of
from tests.tiny_models import tiny_llama, tiny_qwen2, tiny_qwen3
from tests.unit.worker_driver import Driver, prompts_of, runner_of
from worker_proc.models.decoder import rope_frequencies

ORIGINAL, CONTEXT, HEAD_DIM = 64, 256, 16
COUNT = 8
ENGINES = [{"attention_backend": "torch"}, {"attention_backend": "native"}]
SHORT = [1.0 + 0.1 * pair for pair in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.9 * pair for pair in range(HEAD_DIM // 2)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_betas": {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_attention_factor": {**YARN, "attention_factor": 1.3},
    "longrope": LONGROPE,
    "longrope_attention_factor": {**LONGROPE, "factor": 2.0, "attention_factor": 1.2},
}
EQUAL_BELOW = [name for name in TYPES if "longrope" not in name]


def parameters_of(name: str) -> dict[str, Any]:
    return {"rope_theta": 10000.0, **TYPES[name]}


def generated(directory: Path, prompts: list[list[int]], **flags: Any) -> list[list[int]]:
    driver = Driver(runner_of(directory, **flags))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, COUNT, chunk=50)
    return [request.output for request in requests]


@pytest.mark.parametrize("name", [name for name in TYPES if name != "default"])
@pytest.mark.parametrize("length", [ORIGINAL, CONTEXT])
def test_frequencies_and_attention_factor_are_those_of_transformers(
    name: str, length: int, tmp_path: Path
) -> None:
    directory = tiny_llama(tmp_path, rope_parameters=parameters_of(name))
    config = AutoConfig.from_pretrained(directory)
    compute = ROPE_INIT_FUNCTIONS[TYPES[name]["rope_type"]]
    expected, expected_factor = compute(config, torch.device("cpu"), seq_len=length)
    ours = RopeScaling.from_hf(config.to_dict(), HEAD_DIM)
    frequencies, factor = rope_frequencies(ours, length)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen2, tiny_qwen3])
@pytest.mark.parametrize("name", TYPES)
def test_each_type_generates_the_tokens_of_transformers(
    name: str, build: Callable[..., Path], tmp_path: Path
) -> None:
    fields = {"head_dim": HEAD_DIM} if build is tiny_qwen3 else {}
    directory = build(tmp_path, rope_parameters=parameters_of(name), **fields)
    above = [ORIGINAL + 1, 3 * ORIGINAL]
    prompts = prompts_of([5, ORIGINAL - COUNT, *above] if name in EQUAL_BELOW else above)
    expected = greedy_of(directory, prompts, COUNT)
    for backend in ENGINES:
        assert generated(directory, prompts, **backend) == expected, backend


def test_longrope_within_the_original_context_has_the_short_factors(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, rope_parameters=parameters_of("longrope"))
    prompts = prompts_of([5, ORIGINAL - COUNT])
    expected = greedy_of(directory, prompts, COUNT)
    for backend in ENGINES:
        assert generated(directory, prompts, context_length=ORIGINAL, **backend) == expected


def test_dynamic_beyond_the_models_context_is_refused_with_the_remedy() -> None:
    config = {"max_position_embeddings": CONTEXT, "rope_parameters": parameters_of("dynamic")}
    with pytest.raises(ModelError, match=f"start with --context-length {CONTEXT}"):
        rope_frequencies(RopeScaling.from_hf(config, HEAD_DIM), CONTEXT + 1)


def test_a_list_of_factors_of_another_length_is_refused() -> None:
    parameters = {**parameters_of("longrope"), "short_factor": [1.0]}
    config = {"max_position_embeddings": ORIGINAL, "rope_parameters": parameters}
    with pytest.raises(ModelError, match="1 values in short_factor; head_dim 16 needs 8"):
        rope_frequencies(RopeScaling.from_hf(config, HEAD_DIM), ORIGINAL)
