"""Greedy float32 output through the whole server equals `transformers` generate, token for token.

Prompts of mixed lengths, from one token to the context limit, are sent at once in random
order, with aborts in between; then once more, when the prefix cache is warm. Each model under many
ways to compose steps: chunks, batch modes, retraction.

Models of true size get eight prompts, each of which is computed with others in a few steps.
QUADRIGA_TEST_CONTEXT sets the built-in model's context (512 tokens; it has 8,192).
QUADRIGA_TEST_EVERYTHING=1 runs every model with 32 prompts under all of those ways.
"""

import asyncio
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, GPT2Config, GPT2LMHeadModel

from quadriga.client import AsyncClient, SamplingParams
from quadriga.server.config.engine_args import BUILTIN_MODEL, ModelArgs
from quadriga.server.models.resolve import resolve_model
from quadriga.server.models.sources import BUILTINS, cached_builtin_weights
from tests import EVERYTHING
from tests.faults.inject import fault_environment
from tests.server import running_server, settle
from tests.tiny_experts import EXPERTS
from tests.tiny_models import FAMILIES

NEW_TOKENS = 12
NUM_PROMPTS = 32
NUM_PROMPTS_AT_TRUE_SIZE = NUM_PROMPTS if EVERYTHING else 8
# One for each kind of block; tests/unit/worker/test_families.py has all.
SERVED_FAMILIES = ["mistral", "qwen3", "gemma3_text", "exaone4", "glm4", "gpt_neox", "gpt_oss"]


def lengths_up_to(most: int, num: int = NUM_PROMPTS) -> list[int]:
    """Return so many lengths: 1, 2, ..., most, denser where they are small."""
    steps = num - 1
    spread = {max(1, round(most ** (i / steps))) for i in range(num)} | {2, 3}
    return ([*sorted(spread), most] * num)[-num:]


def prompts_of(lengths: list[int], vocab_size: int) -> list[list[int]]:
    chosen = random.Random(5)
    return [[chosen.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def reference(model: Any, prompt: list[int]) -> list[int]:
    """What transformers gives to this prompt alone, without stopping at an end-of-text token."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        suppress_tokens=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


async def serve_all(endpoint: str, prompts: list[list[int]]) -> list[list[int]]:
    """Every prompt at once in random order, with as many requests between them that are aborted."""
    greedy = SamplingParams(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    order = list(range(len(prompts)))
    chosen = random.Random(6)
    chosen.shuffle(order)
    async with AsyncClient(endpoint) as client:
        handles, doomed = {}, []
        for index in order:
            handles[index] = client.submit(prompts[index], greedy)
            doomed.append(client.submit(prompts[chosen.randrange(len(prompts))], greedy))
        for number, handle in enumerate(doomed):
            await asyncio.sleep(0.002 * (number % 3))
            handle.abort()
        completions = [await handles[index].completion() for index in range(len(prompts))]
    return [completion.token_ids for completion in completions]


WAYS = {
    "default": [],
    "narrow": ["--max-batch-size", "3", "--prefill-max-batch-size", "5"],
    "chunks of 1, mixed": ["--chunked-prefill-size", "1"],
    "chunks of 7, prefill first": [
        "--chunked-prefill-size", "7", "--batch-mode", "prefill-first", "--max-batch-size", "4",
    ],
    "chunks of 64, decode first": ["--chunked-prefill-size", "64", "--decode-first"],
    "chunks of 512, alternate": ["--chunked-prefill-size", "512", "--batch-mode", "alternate"],
    "whole prompts, mixed, no cache": ["--chunked-prefill-size", "-1", "--disable-radix-cache"],
    "retracted at random": ["--chunked-prefill-size", "64"],
    "retracted, no cache": ["--no-prefix-cache"],
    "static": ["--batching", "static", "--max-batch-size", "6"],
    "speculated": ["--speculative-method", "ngram", "--num-speculative-tokens", "5"],
    "drafted": ["--speculative-method", "self"],
    "longest prefix first": ["--schedule-policy", "lpm", "--fair-clients"],
}  # fmt: skip


RETRACTION = fault_environment("retract:scheduler:every=5")


def check(model: Any, prompts: list[list[int]], log: Path, way: str, *flags: str) -> None:
    expected = references(model, prompts)
    retracts = way.startswith("retracted")
    environment = RETRACTION if retracts else {}
    flags = (*flags, *WAYS[way], "--dtype", "float32")
    with running_server(log, *flags, environment=environment) as server:
        for temperature_of_cache in ("cold", "warm"):
            got = asyncio.run(serve_all(server.endpoint, prompts))
            info = settle(server.endpoint, 60)
            wrong = [len(p) for p, e, g in zip(prompts, expected, got, strict=True) if e != g]
            assert not wrong, (
                f"{temperature_of_cache}: {len(wrong)} of {len(prompts)} differ;"
                f" prompt lengths {wrong}"
            )
    if way == "speculated":  # so small a model is seldom worth a draft
        assert info["spec_decode_num_accepted_tokens_total"] > 0
    if "--max-total-tokens" not in flags:  # in a small pool both are left to chance
        assert (info["cached_tokens_total"] > 0) == info["prefix_cache"]
        assert (info["retractions"] > 0) == retracts


_references: dict[str, list[list[int]]] = {}


def references(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Of each prompt alone; worked out once for each model."""
    key = f"{model.config.model_type} {model.num_parameters()} {prompts}"
    if key not in _references:
        _references[key] = [reference(model, prompt) for prompt in prompts]
    return _references[key]


def ways(*quick: str) -> list[str]:
    return list(WAYS) if EVERYTHING else list(quick)


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
    flags = ["--model", str(directory), "--worker-threads", "1", "--page-size", "4"]
    check(model, prompts, tmp_path / "log", way, *flags)


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
    flags = ["--model", str(directory), "--worker-threads", "1", "--page-size", "4"]
    check(model, prompts, tmp_path / "log", way, *flags)


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
    flags = ["--model", str(directory), "--worker-threads", "1", "--attention-backend", backend]
    flags += ["--page-size", "4", "--max-total-tokens", "128"]
    check(model, prompts, tmp_path / "log", way, *flags)


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
    prompts = prompts_of(lengths_up_to(1024 - NEW_TOKENS, NUM_PROMPTS_AT_TRUE_SIZE), 50257)
    check(model, prompts, tmp_path / "log", way, "--model", str(directory))


@pytest.mark.usefixtures("every_cpu")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ways("default"))
@pytest.mark.parametrize("name", BUILTINS)
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
    lengths = lengths_up_to(context - NEW_TOKENS, NUM_PROMPTS_AT_TRUE_SIZE)
    prompts = prompts_of(lengths, files.vocab_size)
    flags = ["--model", name, "--context-length", str(context)]
    check(model, prompts, tmp_path / "log", way, *flags)
