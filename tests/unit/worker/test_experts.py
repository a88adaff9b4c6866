"""Mixtures of experts against transformers: the same greedy tokens, on both CPU engines."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import tiny_gpt_oss, tiny_granitemoe, tiny_mixtral, tiny_qwen3_moe
from tests.unit.worker.test_runner import greedy_by_transformers
from tests.unit.worker_driver import Driver, prompts_of, runner_of

COUNT = 8
LENGTHS = [5, 17, 40, 90]
MODELS: dict[str, Callable[[Path], Path]] = {
    "mixtral": tiny_mixtral,
    "mixtral, all experts chosen": lambda path: tiny_mixtral(path, num_experts_per_tok=5),
    "qwen3_moe": tiny_qwen3_moe,
    "qwen3_moe, weights add up to 1": lambda path: tiny_qwen3_moe(
        path, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[]
    ),
    "granitemoe": tiny_granitemoe,
    "gpt_oss": tiny_gpt_oss,
}


@pytest.fixture(scope="module", params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_greedy_tokens_are_those_of_transformers(directory: Path, backend: str) -> None:
    prompts = prompts_of(LENGTHS)
    expected = greedy_by_transformers(directory, prompts, COUNT)
    for chunk in (1, 7, 64):
        driver = Driver(runner_of(directory, attention_backend=backend))
        requests = [driver.add(prompt) for prompt in prompts]
        driver.generate(requests, COUNT, chunk)
        assert [request.output for request in requests] == expected
