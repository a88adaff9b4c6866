"""The engine for a GPU against plain torch, over whole models and steps of every kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.errors import ConfigError
from quadriga.server.config.engine_args import WorkerArgs
from tests import EVERYTHING
from tests.references import greedy_of
from tests.tiny_experts import tiny_gpt_oss, tiny_mixtral
from tests.tiny_models import (
    tiny_exaone4,
    tiny_gemma2,
    tiny_gpt2,
    tiny_gpt_neox,
    tiny_granite,
    tiny_llama,
    tiny_olmo2,
    tiny_opt,
    tiny_qwen3,
)

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from tests.always_few_rows import AlwaysFewRows
from tests.unit.worker_driver import (
    Driver,
    failures_of_unknown_ids,
    load_on_cpu,
    prompts_of,
    runner_of,
)
from worker_proc.engines.factory import make_engine
from worker_proc.gpu import engine
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.ops import Hidden, PaddedHeads, TritonOps
from worker_proc.gpu.pages import Pages
from worker_proc.gpu.products import multiply_by_torch
from worker_proc.models.attention import Ints
from worker_proc.models.layers import Linear

TRITON = {"device": str(DEVICE), "attention_backend": "triton", "max_total_tokens": 512}


def generated(
    directory: Path, lengths: list[int], count: int, chunk: int, **flags: object
) -> list[list[int]]:
    driver = Driver(runner_of(directory, **flags))
    requests = [driver.add(prompt) for prompt in prompts_of(lengths)]
    driver.generate(requests, count, chunk)
    return [request.output for request in requests]


FEW_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3}
# Together the families have every option of a decoder. Two layers where these differ.
FAMILIES: list[tuple[Callable[..., Path], dict[str, Any]]] = [
    (tiny_gpt2, {"n_layer": 1, "n_head": 2}),
    (tiny_qwen3, {"num_hidden_layers": 1}),
    (tiny_olmo2, {"num_hidden_layers": 1}),
    (tiny_granite, {"num_hidden_layers": 1}),
    (tiny_gemma2, {"num_hidden_layers": 2, "sliding_window": 11}),
    (tiny_exaone4, {"num_hidden_layers": 2, "sliding_window": 11}),
    (tiny_gpt_neox, {"num_hidden_layers": 1, **FEW_HEADS}),
    (tiny_opt, {"num_hidden_layers": 1, **FEW_HEADS}),
    (tiny_mixtral, {"num_hidden_layers": 1}),
    (tiny_gpt_oss, {"num_hidden_layers": 2}),
]


@pytest.mark.parametrize(("build", "changes"), FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(
    build: Callable[..., Path], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts in chunks beside rows that decode. Llama itself: tests/integration."""
    directory = build(tmp_path, **changes)
    lengths, count, chunk = ([1, 20, 7], 4, 16) if EVERYTHING else ([1, 14, 2], 3, 9)
    expected = greedy_of(directory, prompts_of(lengths), count)
    assert generated(directory, lengths, count, chunk, **TRITON) == expected


@pytest.mark.parametrize(("build", "changes"), FAMILIES)
def test_products_of_few_rows_give_the_tokens_of_transformers(
    build: Callable[..., Path],
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With norms, activations and additions within the products."""
    monkeypatch.setattr(engine, "Products", AlwaysFewRows)
    directory = build(tmp_path, **changes)
    prompts = prompts_of([3, 9])
    expected = greedy_of(directory, prompts, 3)
    for together in (True, False):
        runner = runner_of(directory, **TRITON)
        assert isinstance(runner.engine, TritonEngine)
        runner.engine.capture_graphs(runner.table)
        products, driver = runner.engine._products, Driver(runner)
        assert isinstance(products, AlwaysFewRows)
        # On a GPU the kernel runs in graphs, and is called as they are captured.
        before = 0 if runner.engine.has_graphs else products.num_computed
        requests = [driver.add(prompt) for prompt in prompts]
        for some in [requests] if together else [[request] for request in requests]:
            driver.generate(some, 3)
        assert [request.output for request in requests] == expected
        assert products.num_computed > before


def test_draws_equal_those_of_plain_torch(gpt2_dir: Path) -> None:
    outputs = []
    for flags in (TRITON, {"attention_backend": "torch"}):
        driver = Driver(runner_of(gpt2_dir, **flags))
        requests = [
            driver.add(prompt, temperature=0.8, seed=seed)
            for seed, prompt in enumerate(prompts_of([3, 5]))
        ]
        requests.append(driver.add([1, 2], temperature=0.7, top_p=0.9, seed=9))
        driver.generate(requests, 3)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


def test_only_rows_that_sample_are_computed_after_the_last_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(tiny_llama(tmp_path, num_hidden_layers=2), **TRITON)
    assert isinstance(runner.engine, TritonEngine)
    rows: list[int] = []

    def multiply(x: torch.Tensor, *factors: torch.Tensor | None) -> torch.Tensor:
        rows.append(len(x))
        return multiply_by_torch(x, *factors)  # type: ignore[arg-type]

    monkeypatch.setattr(runner.engine._products, "_multiply", multiply)
    driver = Driver(runner)
    driver.step(*((driver.add(prompt), len(prompt)) for prompt in prompts_of([5, 7])))
    all_tokens, samples, head = [12] * 4, [2] * 3, [2]
    assert rows == [*all_tokens, 12, *samples, *head]


def logits_of(directory: Path, others: int, chunk: int) -> torch.Tensor:
    """Return the logits `[rows, vocab_size]` of two tokens after a prompt, and of others beside."""
    flags = {**TRITON, "dtype": "bfloat16", "enable_deterministic_inference": True}
    runner = runner_of(directory, **flags)
    compute, seen = runner.engine.logits, []

    def watched(hidden: torch.Tensor, adapters: Ints | None = None) -> torch.Tensor:
        seen.append(compute(hidden, adapters))
        return seen[-1]

    runner.engine.logits = watched  # type: ignore[method-assign]
    driver = Driver(runner)
    prompts = [*prompts_of([20]), *prompts_of([1, 5][:others], seed=1)]
    driver.generate([driver.add(prompt) for prompt in prompts], 2, chunk)
    return torch.cat(seen)


def test_deterministic_logits_depend_neither_on_the_batch_nor_on_chunks(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path, num_hidden_layers=1)
    among_others = logits_of(directory, others=2, chunk=15)
    for row in logits_of(directory, others=0, chunk=100):
        assert (among_others == row).all(-1).any()


def test_fp8_is_refused_for_models_whose_keys_have_biases(gpt2_dir: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 has no scales"):
        runner_of(gpt2_dir, **TRITON, kv_cache_dtype="fp8")


@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_fp8_is_refused_for_models_whose_keys_or_values_are_too_large(
    part: str, tmp_path: Path
) -> None:
    file = tiny_llama(tmp_path, num_hidden_layers=1) / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if part in name:
            weight *= 1e5
    save_file(weights, file)
    with pytest.raises(ConfigError, match="keys or values of this model exceed its largest number"):
        runner_of(tmp_path, **TRITON, kv_cache_dtype="fp8")


def test_a_head_is_padded_to_aligned_rows_of_logits_and_kept_once() -> None:
    heads, head = PaddedHeads(), Linear(8, 100, bias=True)
    head.weight.copy_(torch.randn(100, 8))
    weight = head.weight.clone()
    padded, bias = heads.of(head)
    assert len(padded) == 128 and bias is not None and len(bias) == 128
    assert head.weight.equal(weight) and head.weight.data_ptr() == padded.data_ptr()
    assert padded[100:].eq(0).all() and heads.of(head)[0] is padded


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_quantized", [True, False])
def test_logits_of_a_graph_are_those_of_new_memory_in_a_buffer(
    is_quantized: bool, has_bias: bool
) -> None:
    head, x = Linear(8, 100, bias=has_bias).bfloat16(), torch.randn(3, 8).bfloat16()
    for values in head.parameters():
        values.data = torch.randn(values.shape).bfloat16()
    if is_quantized:
        weight, bias = head.weight.clone(), head.bias
        head.product = lambda rows: multiply_by_torch(rows, weight, bias)
    buffer = torch.full((4, 128), 7.0, dtype=torch.bfloat16)
    pages = cast(Pages, None)
    plain = TritonOps(pages).logits(head, Hidden(x), 0.5, 2.0).x
    kept = TritonOps(pages, logits_buffer=buffer).logits(head, Hidden(x), 0.5, 2.0).x
    assert kept.data_ptr() == buffer.data_ptr() and kept.equal(plain)
    assert plain.abs().max() <= 2.0 and (buffer[3] == 7.0).all()


def test_fp8_keeps_keys_and_values_in_a_byte(llama_dir: Path) -> None:
    runner = runner_of(llama_dir, **TRITON, kv_cache_dtype="fp8")
    driver = Driver(runner)
    request = driver.add(prompts_of([9])[0])
    driver.generate([request], 3)
    assert len(request.output) == 3


@pytest.mark.skipif(DEVICE.type == "cuda", reason="says what happens without a GPU")
@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"attention_backend": "triton", "quantization": "int8"}, "asks for exact products"),
        ({"attention_backend": "native", "kv_cache_dtype": "fp8"}, "needs a GPU"),
        ({"attention_backend": "torch", "kv_cache_dtype": "fp8"}, "needs a GPU"),
        (
            {"attention_backend": "torch", "enable_deterministic_inference": True},
            "native kernels of a CPU or Triton",
        ),
        ({"device": "cuda"}, "CUDA devices here"),
    ],
)
def test_features_of_a_gpu_are_refused_without_one(
    flags: dict[str, object], complaint: str, gpt2_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        runner_of(gpt2_dir, **flags)


def test_the_kernels_of_a_cpu_are_refused_elsewhere(gpt2_dir: Path) -> None:
    args = WorkerArgs(attention_backend="native")
    with pytest.raises(ConfigError, match="native needs a cpu, but the device is mps"):
        make_engine(args, load_on_cpu(gpt2_dir), 8, torch.float32, torch.device("mps"))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="says what happens without a GPU")
def test_triton_on_a_cpu_is_refused_outside_its_interpreter(
    gpt2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="needs a CUDA device, but the device is cpu"):
        runner_of(gpt2_dir, **TRITON)


def test_a_request_with_ids_that_the_model_does_not_have_fails_alone(gpt2_dir: Path) -> None:
    assert len(failures_of_unknown_ids(runner_of(gpt2_dir, **TRITON, max_running_requests=10))) == 8
