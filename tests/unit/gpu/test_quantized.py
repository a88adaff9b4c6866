"""What goes into a GPU's quantized products has the values of the file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.formats.quantization import BLOCK_SIZES
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests import EVERYTHING
from tests.tiny_models import tiny_llama
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.quantized_checkpoint import FORMATS, quantize_checkpoint
from tests.unit.worker.packed_matrices import random_rows

from tests.triton_device import DEVICE, needs_float32_codes  # isort: skip (it comes first)

from tests.unit.worker_driver import Driver, prompts_of
from worker_proc.gpu.engine import TritonEngine
from worker_proc.gpu.quantized import (
    DoesNotFit,
    KernelRows,
    join_alike,
    kernel_rows,
    round_rows,
    why_not_gguf,
)
from worker_proc.loading.loader import load_model
from worker_proc.models.layers import Linear
from worker_proc.startup import build
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

# Of the largest number of a row: one rounding of a scale, and one of a zero, to each dtype.
# Of the tiny model, whose widths are no multiples of 64, or whose codes are places in a table.
TRITON = {"device": str(DEVICE), "attention_backend": "triton"}
TORCH = {"device": "cpu", "attention_backend": "torch", "quantization": "none"}
SOME = (
    "gptq 4 bits, act order",
    "awq",
    "pack-quantized, rows, with zeros",
    "float-quantized, blocks",
    "nf4",
)
UNFIT = [name for name in FORMATS if "nf4" in name or name == "fp8, blocks"]
ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def assert_rounded(values: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().amax(1, keepdim=True)
    assert ((values - expected).abs() <= ROUNDING[dtype] * largest).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", [kind for kind in BLOCK_SIZES if not why_not_gguf(kind)])
def test_blocks_of_a_gguf_have_their_values(kind: str, dtype: torch.dtype) -> None:
    rows = random_rows(kind, 40)
    converted = kernel_rows(rows.unpack(), dtype)
    assert_rounded(converted.dense(), rows.dense(), dtype)
    assert converted.num_bytes <= 1.12 * rows.data.numel()


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_SIZES if why_not_gguf(kind)])
def test_a_type_of_gguf_that_does_not_fit_is_named(kind: str) -> None:
    with pytest.raises(DoesNotFit, match=f"^{kind}, whose "):
        kernel_rows(random_rows(kind, 16).unpack(), torch.bfloat16)


def test_a_group_of_equal_values_has_them() -> None:
    rows = random_rows("Q4_K", 4)
    rows.data[:, :2] = 0  # the scale of the first block
    converted = kernel_rows(rows.unpack(), torch.float16)
    assert_rounded(converted.dense(), rows.dense(), torch.float16)
    assert converted.dense()[:, :256].abs().max() > 0


@pytest.mark.parametrize("name", FORMATS)
def test_codes_of_a_checkpoint_have_their_values(name: str, tmp_path: Path) -> None:
    tiny_llama(tmp_path, tie=False)
    quantize_checkpoint(tmp_path, *FORMATS[name])
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    model = load_model(files, torch.float32, torch.device("cpu"), packed=True)
    found = [rows for m in model.modules() if isinstance(m, Linear) for rows in m.coded]
    assert found
    for rows in found:
        if name in UNFIT:
            with pytest.raises(DoesNotFit):
                kernel_rows(rows, torch.float16)
        else:
            converted = kernel_rows(rows, torch.float16)
            assert_rounded(converted.dense(), rows.dense(), torch.float16)


@pytest.mark.parametrize(("bits", "within"), [(8, 0.006), (4, 0.1)])
def test_a_matrix_is_rounded_to_codes(bits: int, within: float) -> None:
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(bits))
    weight[3] = 0
    rows = round_rows(weight, bits, torch.float16)
    assert rows.group_size == 32
    assert (rows.dense() - weight).norm() / weight.norm() < within
    assert not rows.dense()[3].any()
    # Of 4 bits no scale is worse than that of the whole range.
    if bits == 4:
        spread = weight.view(48, 4, 32)
        step = (spread.amax(-1).clamp(min=0) - spread.amin(-1).clamp(max=0)) / 15
        plain = step.square().mean().sqrt() / 12**0.5
        assert (rows.dense() - weight).square().mean().sqrt() <= 1.02 * plain


def test_rows_of_one_form_become_one_product_and_others_further_ones() -> None:
    def rows(count: int, order: Tensor | None = None) -> KernelRows:
        return replace(round_rows(torch.randn(count, 64), 4, torch.float16), order=order)

    order = torch.randperm(64)
    parts = [rows(3), rows(5), rows(2, order=order), rows(4, order=order.clone()), rows(7)]
    joined = join_alike(parts)
    assert [len(part.codes) for part in joined] == [8, 6, 7]
    dense = torch.cat([part.dense() for part in parts])
    assert torch.equal(torch.cat([part.dense() for part in joined]), dense)


def runner(files: ModelFiles, **flags: Any) -> Runner:
    flags = {"page_size": 4, "max_total_tokens": 512, "max_running_requests": 8, **flags}
    return make_runner(ServerConfig().replace(**{"dtype": "float32", **flags}), files)


def greedy(files: ModelFiles, **flags: Any) -> list[list[int]]:
    driver = Driver(runner(files, **flags))
    requests = [driver.add(prompt) for prompt in prompts_of([3, 17])]
    driver.generate(requests, 8, chunk=8)
    return [request.output for request in requests]


@pytest.mark.parametrize("name", FORMATS if EVERYTHING else SOME)
def test_greedy_tokens_are_those_of_the_values_of_the_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, which keeps scales as they are; torch takes the place of a GPU's kernels."""
    tiny_llama(tmp_path, tie=False, attention_bias=True)
    quantize_checkpoint(tmp_path, *FORMATS[name])
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    expected = greedy(files, **TORCH)
    monkeypatch.setattr(build, "choose_quantization", lambda *_: "checkpoint")
    assert greedy(files, **TRITON) == expected


def mixed(name: str) -> Kind:
    """Mix types, also in the parts of fused matrices."""
    kinds = {"attn_v": Kind.Q8_0, "attn_q": Kind.Q5_1, "ffn_down": Kind.Q5_0, "ffn_up": Kind.Q4_0}
    return next((kind for part, kind in kinds.items() if part in name), Kind.Q4_1)


def test_greedy_tokens_are_those_of_the_values_of_a_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path, tie=False, attention_bias=True, intermediate_size=160)
    files = gguf_of(model, mixed)
    expected = greedy(files, **TORCH)
    monkeypatch.setattr(build, "choose_quantization", lambda *_: "gguf")
    assert greedy(files, **TRITON) == expected


@needs_float32_codes
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_rounded_model_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(tmp_path, tie=False, hidden_size=384, intermediate_size=512)
    files = resolve_model(ModelArgs(model=str(model)))
    flags = TRITON | {"dtype": "bfloat16"}  # humming-kernels has no float32
    monkeypatch.setattr(build, "choose_quantization", lambda *_: name)
    engine = runner(files, **flags).engine
    assert isinstance(engine, TritonEngine)
    layers = [m for m in engine.model.modules() if isinstance(m, Linear)]
    assert all(layer.product is not None and layer.weight.is_meta for layer in layers)
    assert all(len(tokens) == 8 for tokens in greedy(files, **flags))
