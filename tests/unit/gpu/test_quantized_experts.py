"""Experts stay in fewer bits on a GPU, and a model of such experts answers with the same tokens."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from tests.references import greedy_of
from tests.tiny_experts import tiny_gpt_oss, tiny_mixtral, tiny_mxfp4, tiny_qwen3_moe
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint

from tests.triton_device import DEVICE, needs_float32_codes  # isort: skip (it comes first)

from tests.unit.worker.random_adapters import random_adapter
from tests.unit.worker_driver import Driver, load_on_cpu, prompts_of, runner_of
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.quantized import (
    INPUT_MULTIPLE,
    OUTPUT_MULTIPLE,
    KernelRows,
    Numbers,
    round_rows,
)
from worker_proc.gpu.quantized_experts import DenseExperts, ExpertPacker, check_experts
from worker_proc.loading.loader import load_model
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Experts, Linear
from worker_proc.startup import build
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

LENGTHS, COUNT = [3, 17], 8
MIXTURES: dict[str, Callable[..., Path]] = {
    "mixtral": lambda directory: tiny_mixtral(directory, intermediate_size=64),
    "qwen3_moe": lambda directory: tiny_qwen3_moe(directory, moe_intermediate_size=64, head_dim=32),
}
SOME = (
    "gptq 4 bits, act order",
    "awq",
    "pack-quantized, rows, with zeros",
    "float-quantized, blocks",
)


def runner(directory: Path, **flags: Any) -> Runner:
    flags = {"page_size": 4, "max_total_tokens": 512, "max_running_requests": 8, **flags}
    flags |= {"device": str(DEVICE), "attention_backend": "triton"}
    files = resolve_model(ModelArgs(model=str(directory)))
    return make_runner(ServerConfig().replace(dtype="float32", **flags), files)


def greedy(one: Runner) -> list[list[int]]:
    driver = Driver(one)
    requests = [driver.add(prompt) for prompt in prompts_of(LENGTHS)]
    driver.generate(requests, COUNT, chunk=8)
    return [request.output for request in requests]


def experts_of(one: Runner) -> list[Experts]:
    assert isinstance(one.engine, TritonEngine)
    return [module for module in one.engine.model.modules() if isinstance(module, Experts)]


def assert_packed(experts: list[Experts]) -> None:
    assert experts
    for layer in experts:
        assert layer.products is not None
        for linear in (*layer.gate_up, *layer.down):
            assert isinstance(linear, Linear)
            assert linear.weight.is_meta
            assert not linear.coded


@needs_float32_codes
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("family", MIXTURES)
def test_greedy_tokens_are_those_of_transformers_with_the_values_of_the_file(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which keeps scales as they are; torch takes the place of a GPU's kernels."""
    dense = MIXTURES[family](tmp_path / "dense")
    stored = Path(copytree(dense, tmp_path / "stored"))
    values = quantize_checkpoint(stored, *FORMATS[name])
    save_file({name: value.contiguous() for name, value in values.items()},
              dense / "model.safetensors", {"format": "pt"})  # fmt: skip
    monkeypatch.setattr(build, "choose_quantization", lambda *_: "checkpoint")
    one = runner(stored)
    assert_packed(experts_of(one))
    assert greedy(one) == greedy_of(dense, prompts_of(LENGTHS), COUNT)


@needs_float32_codes
@needs_float32_codes
def test_adapters_know_the_order_of_the_experts_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`desc_act` reorders what is between the two products of an expert."""
    dense = tiny_mixtral(tmp_path / "dense", intermediate_size=64, num_hidden_layers=1)
    stored = Path(copytree(dense, tmp_path / "stored"))
    values = quantize_checkpoint(stored, *FORMATS["gptq 4 bits, act order"])
    save_file({name: value.contiguous() for name, value in values.items()},
              dense / "model.safetensors", {"format": "pt"})  # fmt: skip
    reference, model = runner_of(dense, attention_backend="torch"), load_on_cpu(dense)
    assert isinstance(model, Decoder)
    adapter = random_adapter(model, 4, seed=1, gain=True, shift=True, experts=True)
    monkeypatch.setattr(build, "choose_quantization", lambda *_: "checkpoint")
    one = runner(stored, enable_lora=True, max_loras=1)
    assert_packed(experts_of(one))
    assert any(order is not None for order in experts_of(one)[0].inner_orders)
    outputs = []
    for engine in (one, reference):
        engine.engine.set_adapter(0, adapter)
        driver = Driver(engine)
        requests = [driver.add(prompt) for prompt in prompts_of(LENGTHS)]
        driver.set_adapter(requests[1], 0)
        driver.generate(requests, 3)
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]


def test_experts_of_gpt_oss_keep_their_codes_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, stored = tiny_mxfp4(tmp_path)
    monkeypatch.setattr(build, "choose_quantization", lambda *_: "checkpoint")
    one = runner(stored)
    experts = experts_of(one)
    assert_packed(experts)
    products = experts[0].products
    assert products is not None
    gate_up, down = products
    assert isinstance(gate_up, DenseExperts)
    assert isinstance(down, DenseExperts)
    file = sum(
        value.numel() * value.element_size()
        for layer in (gate_up, down)
        for value in layer._weights
    )
    assert gate_up.num_bytes + down.num_bytes == file // 4 * 17 // 32  # of float32: 4.25 bits
    assert greedy(one) == greedy_of(decoded, prompts_of(LENGTHS), COUNT)


@needs_float32_codes
@pytest.mark.parametrize("flag", ["int8", "int4"])
@pytest.mark.parametrize("family", [tiny_mixtral, tiny_gpt_oss])
def test_experts_are_rounded_by_the_flag(
    family: Callable[..., Path], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "choose_quantization", lambda *_: flag)
    one = runner(family(tmp_path, intermediate_size=64))
    assert_packed(experts_of(one))
    assert all(not layer.router.weight.is_meta for layer in experts_of(one))
    assert all(len(tokens) == COUNT for tokens in greedy(one))


def test_a_gpu_keeps_the_codes_of_gpt_oss_and_a_cpu_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stored = tiny_mxfp4(tmp_path)
    files = resolve_model(ModelArgs(model=str(stored)))
    config, gpu = ServerConfig(), torch.device("cuda")
    monkeypatch.setattr(build, "why_not_as_stored", lambda *_: "")
    assert build.choose_quantization(config, files, torch.bfloat16, gpu) == "checkpoint"
    cpu = torch.device("cpu")
    assert build.choose_quantization(config, files, torch.bfloat16, cpu) == "none"
    none = config.replace(quantization="none")
    assert build.choose_quantization(none, files, torch.bfloat16, gpu) == "none"
    monkeypatch.setattr(build, "why_not_as_stored", lambda *_: "the package is missing")
    assert build.choose_quantization(config, files, torch.bfloat16, gpu) == "none"


def coded_experts(directory: Path, name: str) -> Experts:
    stored = MIXTURES["mixtral"](directory)
    quantize_checkpoint(stored, *FORMATS[name])
    files = resolve_model(ModelArgs(model=str(stored)))
    model = load_model(files, torch.float32, torch.device("cpu"), packed=True)
    return next(module for module in model.modules() if isinstance(module, Experts))


def test_what_the_kernels_do_not_multiply_becomes_dense_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = coded_experts(tmp_path, "nf4")
    linear = layer.gate_up[1]
    assert isinstance(linear, Linear)
    expected = torch.cat([rows.dense() for rows in linear.coded])
    with caplog.at_level(logging.WARNING):
        assert ExpertPacker(DEVICE, torch.float32).pack(nn.ModuleList([layer])) == 0
    assert layer.products is None
    assert linear.weight.cpu().equal(expected)
    (record,) = caplog.records
    assert "of experts in 16 bits, as the kernels do not multiply codes of a table" in (
        record.getMessage()
    )


def test_experts_with_and_without_zeros_are_one_product(tmp_path: Path) -> None:
    layer = coded_experts(tmp_path, "awq")
    down_of = [linear for linear in layer.down if isinstance(linear, Linear)]
    first, last = down_of[0].coded[0], down_of[4].coded[0]
    assert first.zero is not None
    first = replace(first, zero=torch.full_like(first.zero, 8))
    down_of[0].coded = (first,)
    expected = [first.dense(), last.dense()]
    ExpertPacker(torch.device("cpu"), torch.float32).pack(nn.ModuleList([layer]))
    assert layer.products is not None
    down = layer.products[1]
    assert isinstance(down, DenseExperts)
    torch.testing.assert_close([down._weights[0], down._weights[4]], expected)


def test_the_check_at_the_start_refuses_wrong_products() -> None:
    rows = [round_rows(torch.randn(64, 96), 4, torch.float32) for _ in range(5)]
    bias = torch.randn(5, 64)
    right = DenseExperts(lambda number: rows[number], 5, bias, torch.float32)
    assert check_experts(right, lambda number: rows[number], 5, bias, torch.float32) < 1e-5
    wrong = DenseExperts(lambda number: rows[4 - number], 5, bias, torch.float32)
    with pytest.raises(ValueError, match="differs by"):
        check_experts(wrong, lambda number: rows[number], 5, bias, torch.float32)


def resident(outputs: int, inputs: int, numbers: Numbers, group: int) -> int:
    """Return the bytes of an expert's packed matrix: e2m1 with exponents, or uint4 with zeros."""
    outputs += -outputs % OUTPUT_MULTIPLE
    inputs += -inputs % INPUT_MULTIPLE
    is_mxfp4, groups = numbers is Numbers.E2M1, inputs // group
    codes = torch.empty(outputs, inputs, dtype=torch.uint8, device="meta")
    scale_dtype = torch.uint8 if is_mxfp4 else torch.bfloat16
    scale = torch.empty(outputs, groups, dtype=scale_dtype, device="meta")
    zero = None if is_mxfp4 else torch.empty(outputs, groups, dtype=torch.uint8, device="meta")
    return KernelRows(numbers, 4, codes, scale, zero).num_bytes


def test_gpt_oss_20b_takes_the_bytes_of_its_file() -> None:
    """Widths of 2,880 are padded to 2,944."""
    experts = 24 * 32 * (
        resident(5760, 2880, Numbers.E2M1, 32) + resident(2880, 2880, Numbers.E2M1, 32)
    )  # fmt: skip
    stored = 24 * 32 * 3 * 2880 * 2880 * 17 // 32
    rest = 2 * (2 * 201_088 * 2880 + 24 * (5120 * 2880 + 2880 * 4096))
    assert stored <= experts <= 1.04 * stored
    assert 13.5e9 < stored + rest < 14e9
    assert experts + rest <= 1.05 * (stored + rest)
    assert experts + rest < 24 * 2**30 * 0.65  # a third of 24 GB is left for keys and values


def test_qwen3_30b_a3b_takes_the_bytes_of_its_awq() -> None:
    """Groups of 128 with a scale of 16 bits and a zero of 4."""
    experts = 48 * 128 * (
        resident(1536, 2048, Numbers.UNSIGNED, 128) + resident(2048, 768, Numbers.UNSIGNED, 128)
    )  # fmt: skip
    weights = 48 * 128 * 3 * 2048 * 768
    stored = weights * (4 + 20 / 128) / 8
    assert stored <= experts <= 1.01 * stored
    assert 15e9 < experts < 15.1e9
