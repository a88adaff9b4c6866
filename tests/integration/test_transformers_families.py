"""Many families of transformers over pages, each as a tiny model with the fields that it knows."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.references import greedy_of
from tests.transformers_models import CONTEXT_LENGTH, FAMILIES, tiny_model, transformers_runner
from tests.unit.worker_driver import Driver, prompts_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported.md"
NEW_TOKENS = 8
FIELDS: dict[str, Any] = {
    "attention_chunk_size": 20,
    "d_model": 64,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "first_k_dense_replace": 1,
    "global_head_dim": 16,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "layer_types": None,
    "moe_intermediate_size": 32,
    "n_embd": 64,
    "n_group": 2,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": CONTEXT_LENGTH,
    "n_routed_experts": 8,
    "no_rope_layers": None,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_layers": 2,
    "num_local_experts": 8,
    "shared_expert_intermediate_size": 32,
    "sliding_window": 20,
    "topk_group": 1,
    "vocab_size_per_layer_input": 512,
    "word_embed_proj_dim": 64,
}
CHANGES = {"deepseek_v2": {**FAMILIES["deepseek_v3"], "topk_method": "greedy"}}


def listed_families() -> list[str]:
    """Return the families that the docs say are compared."""
    section = PAGE.read_text().split("## Any other model")[1].split("\n## ")[0]
    listed = re.search(r"Each `model_type` compared: (.+?)\.", section)
    assert listed is not None
    return re.findall(r"`(\w+)`", listed[1])


def fields_of(kind: str) -> dict[str, Any]:
    """Return those of FIELDS that the config of a family has and that can be set."""
    known = AutoConfig.for_model(kind)
    fields = {
        name: value
        for name, value in FIELDS.items()
        if hasattr(known, name)
        and getattr(getattr(type(known), name, None), "fset", True) is not None
    }
    return fields | FAMILIES.get(kind, {}) | CHANGES.get(kind, {})


@pytest.mark.parametrize("kind", listed_families())
def test_a_family_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    directory = tiny_model(kind, tmp_path / "model", **fields_of(kind))
    prompts = prompts_of([1, 5, 17, 33, 60])
    driver = Driver(transformers_runner(directory))
    requests = [driver.add(prompt) for prompt in prompts]
    driver.generate(requests, NEW_TOKENS, chunk=7)
    assert [request.output for request in requests] == greedy_of(directory, prompts, NEW_TOKENS)
