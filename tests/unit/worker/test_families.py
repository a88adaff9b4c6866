"""Every family against transformers: the same greedy tokens and log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quadriga.wire.packing import pack_ids
from quadriga.wire.worker import EXTEND, NewSlot, SlotSamplingParams, StepPlan
from tests.references import greedy_of
from tests.tiny_experts import EXPERTS, tiny_mixtral, tiny_qwen3_moe
from tests.tiny_models import FAMILIES, tiny_glm, tiny_gpt_neox, tiny_opt, tiny_phi3
from tests.unit.worker_driver import Driver, prompts_of, runner_of
from worker_proc.engines import torch_engine

COUNT = 8
LENGTHS = [17, 40, 90]  # longer than the windows of the tiny models
BACKENDS = ["torch", "native"]
CHUNKS = [1, 7, 64]
NO_IDS = pack_ids([])

# Options of a family that its tiny model does not have.
LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.6,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + 0.9 * pair for pair in range(6)],
}
VARIANTS: dict[str, Callable[[Path], Path]] = {
    "mixtral (all experts chosen)": lambda path: tiny_mixtral(path, num_experts_per_tok=5),
    "qwen3_moe (weights add up to 1, every second layer dense)": lambda path: tiny_qwen3_moe(
        path, norm_topk_prob=True, decoder_sparse_step=2, mlp_only_layers=[]
    ),
    "glm (no biases, tied)": lambda path: tiny_glm(
        path, attention_bias=False, tie_word_embeddings=True
    ),
    "gpt_neox (sequential, no biases in attention)": lambda path: tiny_gpt_neox(
        path, use_parallel_residual=False, attention_bias=False
    ),
    "opt (GELU, no biases)": lambda path: tiny_opt(
        path, activation_function="gelu", enable_bias=False
    ),
    "phi3 (beyond the original context of LongRoPE, no window)": lambda path: tiny_phi3(
        path,
        sliding_window=None,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=16,
        tie_word_embeddings=True,
    ),
}
MODELS: dict[str, Callable[[Path], Path]] = {**FAMILIES, **EXPERTS, **VARIANTS}


@dataclass(frozen=True)
class Case:
    """A model, prompts, and what transformers makes of them.

    Attributes:
        directory: Of the checkpoint.
        prompts: Token ids.
        expected: The greedy tokens after each prompt.
        logprobs: Of the tokens of the longest prompt but the first: [tokens - 1] float32.
    """

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]
    logprobs: torch.Tensor


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = MODELS[request.param](tmp_path_factory.mktemp("model"))
    prompts = prompts_of(LENGTHS)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = greedy_of(model, prompts, COUNT)
    ids = torch.tensor([prompts[-1]])
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
    return Case(directory, prompts, expected, logprobs.gather(1, ids[0, 1:, None])[:, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_tokens_are_those_of_transformers(case: Case, backend: str) -> None:
    runner = runner_of(case.directory, attention_backend=backend)
    for chunk in CHUNKS:
        driver = Driver(runner)
        requests = [driver.add(prompt) for prompt in case.prompts]
        driver.generate(requests, COUNT, chunk)
        assert [request.output for request in requests] == case.expected, f"chunks of {chunk}"
        runner.table.release_all()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_scores_in_blocks_of_queries_give_the_same_tokens(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft caps and sinks, with windows, where the scores of a prompt are too many to keep."""
    directory, prompts = MODELS[family](tmp_path), prompts_of(LENGTHS)
    monkeypatch.setattr(torch_engine, "MAX_SCORES", 0)
    driver = Driver(runner_of(directory, attention_backend="torch"))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, COUNT, 64)
    assert [request.output for request in requests] == greedy_of(directory, prompts, COUNT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_are_those_of_transformers(case: Case, backend: str) -> None:
    runner = runner_of(case.directory, attention_backend=backend)
    prompt = case.prompts[-1]
    pages = pack_ids(range(-(-len(prompt) // runner.table.page_size)))
    rules = SlotSamplingParams(num_prompt=len(prompt), prompt_logprobs=1)
    new = [NewSlot(0, pack_ids(prompt), 0, pages, 0.0, -1, 1.0, 0, rules)]
    pieces = []
    for step, first in enumerate(range(0, len(prompt), 7)):
        count = pack_ids([min(7, len(prompt) - first)])
        plan = StepPlan(step, EXTEND, pack_ids([0]), count, [] if step else new, NO_IDS)
        pieces += runner.run(plan).prompt_logprobs
    values = np.concatenate([np.frombuffer(piece.block.values, "<f4") for piece in pieces])
    np.testing.assert_allclose(values, case.logprobs, atol=1e-3)
