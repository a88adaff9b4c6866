"""Adapters against PEFT's unmerged models: the same greedy tokens and log-probabilities."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from quadriga.sampling.pooling import MEAN, Pooling
from quadriga.wire.worker import NO_ADAPTER
from tests.adapted_runs import (
    check_adapted,
    check_answers,
    files_of,
    load_adapter,
    requests_of,
    run_adapted,
    run_on_ranks,
    torch_runner,
)
from tests.tiny_adapters import make_adapter
from tests.tiny_encoders import ENCODERS
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES
from tests.unit.worker_driver import Driver, prompts_of, runner_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice for training

MODELS = {**FAMILIES, **EXPERTS}
EXPERT_WEIGHTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# Kinds of adapters, each with a family whose tiny model has what the kind changes.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": ("llama", {"use_dora": True}),
    "DoRA, transposed": ("gpt2", {"use_dora": True}),
    "DoRA, fused, stabilized": ("phi3", {"use_dora": True, "use_rslora": True}),
    "DoRA, fused by head": ("gpt_neox", {"use_dora": True}),
    "DoRA with biases, permuted": ("ernie4_5", {"use_dora": True, "bias": "lora_only"}),
    "DoRA of embedding and head": (
        "llama",
        {"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ),
    "scaled embedding": ("gemma3_text", {"target_modules": ["embed_tokens", "q_proj"]}),
    "tied embedding and head": (
        "llama",
        {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "saved embedding": ("gemma", {"modules_to_save": ["embed_tokens"]}),
    "saved head of a tied model": ("llama", {"modules_to_save": ["lm_head"]}),
    "saved embedding and head": ("mistral", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tokens of a tied model": (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": [132, 3, 500]},
    ),
    "tokens of an embedding": (
        "gemma3_text",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [132, 3]}},
    ),
    "tokens of embedding and head": (
        "mistral",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [132, 3], "lm_head": [7]},
        },
    ),
    "head with a bias": ("gptj", {"target_modules": ["lm_head", "q_proj"], "bias": "lora_only"}),
    "biases": ("gpt2", {"bias": "lora_only"}),
    "all biases": ("qwen2", {"bias": "all"}),
    "biases of U": ("glm", {"bias": "lora_only", "lora_bias": True}),
    "patterns": (
        "llama",
        {
            "target_modules": r".*layers\.[01]\..*(q|v|up)_proj",
            "rank_pattern": {r"layers\.0\..*q_proj": 7, "v_proj": 2},
            "alpha_pattern": {"up_proj": 3},
            "use_rslora": True,
        },
    ),
    "some layers": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "excluded": ("llama", {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.2.*"}),
    "experts": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": [*EXPERT_WEIGHTS, "mlp.gate.weight"]},
    ),
    "one weight of experts": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": EXPERT_WEIGHTS[1:],
            "alpha_pattern": {EXPERT_WEIGHTS[1]: 31},
        },
    ),
    "interleaved experts": ("gpt_oss", {"target_modules": [], "target_parameters": EXPERT_WEIGHTS}),
    "stacked experts": (
        "granitemoe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "router.weight"],
        },
    ),
}


# One of every family with experts.
EXPERT_KINDS = ["experts", "one weight of experts", "interleaved experts", "stacked experts"]


@pytest.mark.parametrize("family", MODELS)
def test_adapters_of_every_family_beside_each_other_and_the_base(
    family: str, tmp_path: Path
) -> None:
    directory = MODELS[family](tmp_path / "model")
    adapters = [
        make_adapter(directory, tmp_path / str(rank), seed=rank, rank=rank) for rank in (4, 7)
    ]
    check_adapted(torch_runner(files_of(directory), adapters), directory, adapters)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    directory = MODELS[family](tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter", **changes)
    check_adapted(torch_runner(files_of(directory), [adapter]), directory, [adapter])


@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_native_kernels_compute_adapters_of_experts(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    directory = MODELS[family](tmp_path / "model")
    adapters = [
        make_adapter(directory, tmp_path / str(rank), seed=rank, rank=rank, **changes)
        for rank in (4, 18)
    ]
    runner = runner_of(directory, attention_backend="native")
    for index, path in enumerate(adapters):
        runner.engine.set_adapter(index, load_adapter(directory, path))
    check_adapted(runner, directory, adapters)


def test_eight_ranks_and_the_base_in_one_batch(tmp_path: Path) -> None:
    directory = MODELS["llama"](tmp_path / "model")
    ranks = [4, 8, 16, 32, 48, 64, 128, 256]
    adapters = [
        make_adapter(directory, tmp_path / str(rank), seed=rank, rank=rank) for rank in ranks
    ]
    runner = torch_runner(files_of(directory), adapters)
    check_adapted(runner, directory, adapters, lengths=[21], chunk=4)


def test_an_index_gets_another_adapter_and_then_none(tmp_path: Path) -> None:
    directory = MODELS["llama"](tmp_path / "model")
    adapters = [make_adapter(directory, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    runner = runner_of(directory, attention_backend="torch")
    ((prompt, _), *_) = requests_of(1, [9])
    for path in adapters:
        runner.engine.set_adapter(0, load_adapter(directory, path))
        answers = run_adapted(runner, [(prompt, 0)], 8)
        check_answers(directory, [path], [(prompt, 0)], answers)
        assert (runner.table.adapters == NO_ADAPTER).all()
    runner.engine.set_adapter(0, None)
    with pytest.raises(ValueError, match="a row has the adapter 0, which is not loaded"):
        run_adapted(runner, [(prompt, 0)], 8)


RANK_KINDS = ["DoRA", "DoRA with biases, permuted", "saved embedding and head", "biases of U",
              "DoRA, fused, stabilized", "experts", "patterns"]  # fmt: skip


@pytest.mark.parametrize("kind", RANK_KINDS)
def test_two_ranks_give_the_answers_of_one_process(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    directory = MODELS[family](tmp_path / "model")
    adapters = [make_adapter(directory, tmp_path / "adapter", **changes)]
    requests = requests_of(1, [5, 30])
    for answers in run_on_ranks(files_of(directory), adapters, 2, requests, 32):
        check_answers(directory, adapters, requests, answers)


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_of_encoders_beside_each_other_and_the_base(family: str, tmp_path: Path) -> None:
    directory = ENCODERS[family](tmp_path / "model")

    def reference() -> Any:
        return AutoModel.from_pretrained(directory, dtype=torch.float32)

    changes: dict[str, Any] = {"task_type": "FEATURE_EXTRACTION", "use_dora": family != "bert"}
    adapter = make_adapter(directory, tmp_path / "adapter", model=reference(), **changes)
    runner = torch_runner(files_of(directory), [adapter])
    driver, prompts = Driver(runner), prompts_of([17, 17], seed=3)
    requests = [driver.add(prompt) for prompt in prompts]
    for request in requests:
        driver.set_pooling(request, Pooling(MEAN, normalize=False, whole=True))
    runner.table.apply(driver.plan([]))  # the requests get their slots
    runner.table.adapters[requests[0].slot] = 0
    result = runner.run(driver.plan([(request, 17) for request in requests]))
    vectors = {row.row: np.frombuffer(row.vector, "<f4") for row in result.vectors}
    models = [peft.PeftModel.from_pretrained(reference(), str(adapter)), reference()]
    for row, (model, prompt) in enumerate(zip(models, prompts, strict=True)):
        with torch.inference_mode():
            states = model.eval()(torch.tensor([prompt])).last_hidden_state[0]
        np.testing.assert_allclose(vectors[row], states.mean(0), rtol=0, atol=2e-5)
