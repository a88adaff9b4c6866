"""--quantization gguf keeps the file's codes in the panels that the kernels multiply."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import Tensor

from quadriga.config.server_config import ModelArgs
from quadriga.config.worker_args import WorkerArgs
from quadriga.errors import ConfigError, ModelError
from quadriga.model_files.resolve import ModelFiles, resolve_model
from tests.tiny_models import tiny_gpt2, tiny_llama
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.worker.test_cpu_kernels import (
    CONTEXT,
    NUM_SLOTS,
    QUANTISED_TOLERANCE,
    Compared,
    drive,
)
from worker_proc.attention.torch_reference import TorchAttention
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.quantization import GROUP_SIZE, quantized_as_in_gguf
from worker_proc.cpu.weights import LANES, to_quantised_panels
from worker_proc.engine_factory import make_engine
from worker_proc.loading.checkpoints import from_gguf
from worker_proc.loading.gguf_blocks import PackedRows
from worker_proc.loading.loader import load_model
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.torch_engine import TorchEngine

CPU = torch.device("cpu")
PAGE_SIZE = 16
PAGES = NUM_SLOTS * CONTEXT // PAGE_SIZE
BITS = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}


def load(files: ModelFiles, packed: bool, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(files, dtype, CPU, packed)


def packed_rows(values: Tensor, kind: Kind) -> tuple[PackedRows, Tensor]:
    """Return rows as a file has them, and their values."""
    data = quantize(values.numpy(), kind)
    return PackedRows(kind.name, torch.from_numpy(data)), torch.from_numpy(dequantize(data, kind))


def kept(parts: list[PackedRows]) -> tuple[int, Tensor]:
    """Return the bits of the packed matrix, and the values [outputs, inputs] of its panels."""
    groups = quantized_as_in_gguf(parts)
    outputs, depth = groups.scale.shape
    return groups.bits, values_of(to_quantised_panels(groups), groups.bits, depth)[:outputs]


def values_of(panels: Tensor, bits: int, groups: int) -> Tensor:
    """Read panels as quantised.h defines them: [columns, inputs]."""
    lines = GROUP_SIZE * bits // 32
    numbers, factors = panels.view(torch.uint8).tensor_split([groups * lines * LANES * 4], 1)
    units = numbers.view(-1, groups, lines, LANES, 4)
    if bits == 4:
        units = torch.cat((units & 15, units >> 4), 2)
    halves = factors.contiguous().view(torch.float16).float().view(len(panels), -1, groups, LANES)
    scale, *least = halves[:, :, :, None, :, None].unbind(1)
    values = units * scale + least[0] if least else (units.float() - 128) * scale
    return values.permute(0, 3, 1, 2, 4).reshape(-1, groups * GROUP_SIZE)


@pytest.mark.parametrize("kind", BITS)
def test_panels_hold_exactly_the_numbers_of_the_file(kind: Kind) -> None:
    rows, expected = packed_rows(torch.randn(37, 96), kind)
    assert rows.shape == (37, 96)
    assert torch.equal(rows.dense(), expected)
    bits, values = kept([rows])
    assert bits == BITS[kind]
    assert torch.equal(values, expected)


def test_a_scale_too_large_for_its_least_value_in_float16_is_kept_in_8_bits() -> None:
    rows, expected = packed_rows(torch.randn(16, 64).clamp(-2, 2) * 1e5, Kind.Q4_0)
    bits, values = kept([rows])
    assert bits == 8
    assert torch.equal(values, expected)


def test_fused_parts_of_4_bits_stay_in_4_bits_whichever_they_are() -> None:
    first, second = (
        packed_rows(torch.randn(16, 64), Kind.Q4_0),
        packed_rows(torch.ones(8, 64), Kind.Q4_1),
    )
    bits, values = kept([first[0], second[0]])
    assert bits == 4
    assert torch.equal(values, torch.cat((first[1], second[1])))


def test_one_part_of_8_bits_makes_a_fused_matrix_one_of_8_bits_and_only_q4_1_is_rounded() -> None:
    parts = [packed_rows(torch.randn(16, 64), kind) for kind in BITS]
    bits, values = kept([rows for rows, _ in parts])
    assert bits == 8
    exact, rounded = [torch.cat([expected for _, expected in parts])[16 * i :][:16] for i in (0, 1)]
    assert torch.equal(values[:16], exact)
    assert torch.equal(values[32:], parts[2][1])
    assert not torch.equal(values[16:32], rounded)
    assert (values[16:32] - rounded).abs().max() < rounded.abs().max() / 250


def mixed(name: str) -> Kind:
    """Mix all formats in one model, also in the parts of fused matrices."""
    kinds = {"attn_v": Kind.Q8_0, "attn_q": Kind.Q4_0, "ffn_gate": Kind.Q4_1, "output": Kind.F16}
    return next((kind for part, kind in kinds.items() if f"{part}." in name), Kind.Q4_0)


def llama(directory: Path) -> Path:
    """Write a model with untied embeddings and biases."""
    return tiny_llama(
        directory, tie=False, attention_bias=True, mlp_bias=True, intermediate_size=160
    )


@pytest.mark.parametrize("build", [tiny_gpt2, llama])
@pytest.mark.parametrize("kind", BITS)
def test_fused_permuted_and_transposed_matrices_have_the_numbers_of_the_dense_model(
    kind: Kind, build: Callable[[Path], Path], tmp_path: Path
) -> None:
    files = gguf_of(build(tmp_path), lambda name: kind)
    dense = dict(load(files, packed=False).named_modules())
    seen = 0
    for name, layer in load(files, packed=True).named_modules():
        if isinstance(layer, Linear | Embedding) and layer.weight.shape[1] % GROUP_SIZE == 0:
            assert torch.equal(kept(list(layer.blocks))[1], dense[name].weight), name
            seen += 1
    assert seen == (2 if build is tiny_gpt2 else 14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [tiny_gpt2, llama])
def test_steps_have_nearly_the_numbers_of_plain_torch_on_the_files_weights(
    build: Callable[[Path], Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    files = gguf_of(build(tmp_path), mixed)
    args = WorkerArgs(quantization="gguf", attention_backend="native", page_size=PAGE_SIZE)
    ours = make_engine(args, load(files, True, dtype), PAGES, dtype, CPU)
    model = load(files, packed=False)
    attention = TorchAttention(model.attention_shape, PAGES, PAGE_SIZE, torch.float32, CPU)
    theirs = TorchEngine(model, attention)
    with torch.inference_mode():
        assert isinstance(ours, NativeEngine)
        drive(Compared(ours, theirs, QUANTISED_TOLERANCE), dtype, PAGE_SIZE, seed=10)


def test_a_fused_matrix_with_a_part_in_float16_stays_dense(tmp_path: Path) -> None:
    kinds = {"blk.1.attn_v.weight": Kind.F16}
    files = gguf_of(llama(tmp_path), lambda name: kinds.get(name, Kind.Q4_0))
    layers = dict(load(files, packed=True).named_modules())
    dense = dict(load(files, packed=False).named_modules())
    name = "blocks.1.qkv_proj"
    assert layers[name].blocks == ()
    assert torch.equal(layers[name].weight, dense[name].weight)
    assert len(layers["blocks.0.qkv_proj"].blocks) == 3


def test_other_formats_of_blocks_are_rounded_to_8_bits(tmp_path: Path) -> None:
    files = gguf_of(llama(tmp_path), lambda name: Kind.Q5_0)
    layer = load(files, packed=True).get_submodule("blocks.0.out_proj")
    expected = load(files, packed=False).get_submodule("blocks.0.out_proj").weight
    assert isinstance(layer, Linear)
    assert isinstance(expected, torch.Tensor)
    bits, values = kept(list(layer.blocks))
    assert bits == 8
    assert (values - expected).abs().max() < expected.abs().max() / 250


def test_positions_that_are_added_and_never_multiplied_are_not_kept_packed(tmp_path: Path) -> None:
    rows, expected = packed_rows(torch.randn(8, 64), Kind.Q8_0)
    file, index = tmp_path / "a.gguf", tmp_path / "a.json"
    file.write_bytes(np.asarray(rows.data).tobytes())
    entry = {"type": "Q8_0", "shape": [8, 64], "offset": 0, "bytes": rows.data.numel()}
    index.write_text(json.dumps({"position_embd.weight": entry, "token_embd.weight": entry}))
    tensors = dict(from_gguf(file, index, {"model_type": "gpt2"}, packed=True))
    assert isinstance(tensors["wte.weight"], PackedRows)
    wpe = tensors["wpe.weight"]
    assert isinstance(wpe, Tensor)
    assert torch.equal(wpe, expected)


def test_a_packed_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    files = gguf_of(llama(tmp_path))
    files = dataclasses.replace(files, config={**files.config, "intermediate_size": 192})
    with pytest.raises(ModelError, match=r"down_proj\.weight is \[96, 160\].*\[96, 192\]"):
        load(files, packed=True)


def test_a_model_that_is_no_gguf_is_refused_with_what_to_take_instead(tmp_path: Path) -> None:
    directory = str(tiny_llama(tmp_path))
    for load_format in ("auto", "dummy"):
        files = resolve_model(ModelArgs(model=directory, load_format=load_format))
        with pytest.raises(ConfigError, match=r"not read from one.*int8 or int4"):
            load(files, packed=True)


def test_a_gguf_without_quantised_matrices_is_refused_with_what_to_take_instead(
    tmp_path: Path,
) -> None:
    files = gguf_of(llama(tmp_path), lambda name: Kind.F16)
    with pytest.raises(ConfigError, match=r"no matrix of .*tiny\.gguf is quantised.*int8 or int4"):
        load(files, packed=True)
