"""Adapters against PEFT's unmerged models: the same greedy tokens and log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.adapted_runs import NO_ADAPTER, check_answer, load_adapter, run_adapted
from tests.tiny_adapters import make_adapter
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES
from tests.unit.worker_driver import prompts_of, runner_of

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's advice for training

MODELS = {**FAMILIES, **EXPERTS}
COUNT = 64
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


def check(directory: Path, adapters: list[Path], lengths: list[int]) -> None:
    """Check prompts of all adapters and of the base in one batch."""
    runner = runner_of(directory, attention_backend="torch", max_running_requests=16)
    for index, path in enumerate(adapters):
        runner.engine.set_adapter(index, load_adapter(directory, path))
    indexes = [*range(len(adapters)), NO_ADAPTER]
    requests = [
        (prompt, index) for index in indexes for prompt in prompts_of(lengths, seed=index + 1)
    ]
    answers = run_adapted(runner, requests, COUNT)
    for index in indexes:
        base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        model = (
            base if index == NO_ADAPTER else peft.PeftModel.from_pretrained(base, adapters[index])
        )
        model.eval()
        for (prompt, of_prompt), answer in zip(requests, answers, strict=True):
            if of_prompt == index:
                check_answer(model, prompt, answer)


@pytest.mark.parametrize("family", MODELS)
def test_adapters_of_every_family_beside_each_other_and_the_base(
    family: str, tmp_path: Path
) -> None:
    directory = MODELS[family](tmp_path / "model")
    adapters = [
        make_adapter(directory, tmp_path / str(rank), seed=rank, rank=rank) for rank in (4, 7)
    ]
    check(directory, adapters, [5, 30])


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    directory = MODELS[family](tmp_path / "model")
    adapter = make_adapter(directory, tmp_path / "adapter", **changes)
    check(directory, [adapter], [5, 30])
