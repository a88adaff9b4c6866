"""Greedy float32 output through the whole server equals `transformers` generate, token for token.

Prompts of mixed lengths, from one token to the context limit, are sent at once in random
order, with aborts in between; then once more, when the prefix cache is warm. Each model under many
ways to compose steps: chunks, batch modes, retraction. A half of the ways and most families run
without processes: the real scheduler and the real worker in simulated time.

Models of true size get five prompts, each of which is computed with others in a few steps.
QUADRIGA_TEST_CONTEXT sets the built-in model's context (512 tokens; it has 8,192).
QUADRIGA_TEST_EVERYTHING=1 runs every model with 32 prompts under all of those ways.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, GPT2Config, GPT2LMHeadModel

from quadriga.server.config.engine_args import BUILTIN_MODEL, ModelArgs
from quadriga.server.models.resolve import resolve_model
from quadriga.server.models.sources import BUILTINS, cached_builtin_weights
from tests import EVERYTHING
from tests.integration.equality import (
    NEW_TOKENS,
    WAYS,
    check,
    check_in_process,
    lengths_up_to,
    prompts_of,
    ways,
)
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES

NEW_TOKENS_AT_TRUE_SIZE = NEW_TOKENS if EVERYTHING else 6
# The other ways run without processes.
SERVED_WAYS = {
    "default", "narrow", "chunks of 7, prefill first", "retracted at random", "static",
    "speculated", "drafted",
}  # fmt: skip
FLAGS = ["--worker-threads", "1", "--page-size", "4"]
# One for each kind of block; tests/unit/worker/test_families.py has all.
SERVED_FAMILIES = ["mistral", "qwen3", "gemma3_text", "exaone4", "glm4", "gpt_neox", "gpt_oss"]


def lengths_at_true_size(most: int) -> list[int]:
    return lengths_up_to(most) if EVERYTHING else [1, 6, 32, 178, most]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", way) for way in WAYS] + [("gpt2", way) for way in ways("default", "narrow")],
)
def test_a_tiny_model_of_each_family(
    family: str, way: str, gpt2_dir: Path, llama_dir: Path, tmp_path: Path
) -> None:
    directory = {"gpt2": gpt2_dir, "llama": llama_dir}[family]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    context = model.config.max_position_embeddings
    prompts = prompts_of(lengths_up_to(context - NEW_TOKENS), 512)
    if EVERYTHING or (family == "llama" and way in SERVED_WAYS):
        check(model, prompts, tmp_path / "log", way, "--model", str(directory), *FLAGS)
    else:
        check_in_process(model, prompts, directory, way, *FLAGS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in SERVED_FAMILIES for way in ways("chunks of 7, prefill first")]
    + [(family, "retracted at random") for family in ("gemma3_text", "gpt_oss") if not EVERYTHING],
)
def test_families_of_other_blocks_give_the_tokens_of_transformers(
    family: str, way: str, tmp_path: Path
) -> None:
    directory = {**FAMILIES, **EXPERTS}[family](tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompts = prompts_of(lengths_up_to(model.config.max_position_embeddings - NEW_TOKENS), 512)
    if EVERYTHING or (family, way) == ("gpt_oss", "chunks of 7, prefill first"):
        check(model, prompts, tmp_path / "log", way, "--model", str(directory), *FLAGS)
    else:
        check_in_process(model, prompts, directory, way, *FLAGS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("way", "backend"),
    [(way, "auto") for way in ways("chunks of 7, prefill first", "static", "retracted at random")]
    + [(way, "torch") for way in ways("retracted at random")],
)
def test_prompts_longer_than_the_kv_pool_where_every_layer_has_a_window(
    way: str, backend: str, tmp_path: Path
) -> None:
    directory = FAMILIES["mistral"](tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert model.config.sliding_window == 24
    prompts = prompts_of(lengths_up_to(model.config.max_position_embeddings - NEW_TOKENS), 512)
    flags = [*FLAGS, "--attention-backend", backend, "--max-total-tokens", "128"]
    if EVERYTHING or (way, backend) == ("retracted at random", "auto"):
        check(model, prompts, tmp_path / "log", way, "--model", str(directory), *flags)
    else:
        check_in_process(model, prompts, directory, way, *flags)


@pytest.mark.usefixtures("every_cpu")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ways("chunks of 64, decode first"))
def test_gpt2_at_full_size_with_random_weights(way: str, tmp_path: Path, gpt2_dir: Path) -> None:
    directory = tmp_path / "gpt2"
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0)).eval()
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(gpt2_dir / name, directory / name)
    prompts = prompts_of(lengths_at_true_size(1024 - NEW_TOKENS), 50257)
    flags = ["--model", str(directory)]
    check(model, prompts, tmp_path / "log", way, *flags, num_tokens=NEW_TOKENS_AT_TRUE_SIZE)


@pytest.mark.usefixtures("every_cpu")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ways("default"))
@pytest.mark.parametrize("name", [name for name, one in BUILTINS.items() if not one.is_archive])
def test_the_built_in_models(name: str, way: str, tmp_path: Path) -> None:
    if name != BUILTIN_MODEL and cached_builtin_weights(name) is None:
        pytest.skip(f"{name} is not in the cache; quadriga serve --model {name}")
    files = resolve_model(ModelArgs(name))
    assert files.weights is not None
    model = AutoModelForCausalLM.from_pretrained(
        files.weights.parent,
        gguf_file=files.weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    context = int(os.environ.get("QUADRIGA_TEST_CONTEXT", "512"))
    prompts = prompts_of(lengths_at_true_size(context - NEW_TOKENS), files.vocab_size)
    flags = ["--model", name, "--context-length", str(context)]
    check(model, prompts, tmp_path / "log", way, *flags, num_tokens=NEW_TOKENS_AT_TRUE_SIZE)
