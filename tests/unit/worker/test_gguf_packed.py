"""--quantization gguf keeps the file's codes in the panels that the kernels multiply."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from torch import Tensor

from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.engine_args import ModelArgs, WorkerArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.model_impl import check_servable
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests.tiny_models import tiny_gpt2, tiny_llama, tiny_phi3
from tests.unit.gguf_checkpoint import gguf_of
from tests.unit.worker.compared_engines import (
    CONTEXT,
    NUM_SLOTS,
    QUANTIZED_TOLERANCE,
    Compared,
    drive,
)
from tests.unit.worker.native_matrices import NativeMatrix
from worker_proc.cpu.engine import NativeEngine
from worker_proc.cpu.weights import GROUP_SIZE
from worker_proc.engines.factory import make_engine
from worker_proc.engines.torch_engine import TorchAttention, TorchEngine
from worker_proc.loading.checkpoints import from_gguf
from worker_proc.loading.loader import load_model
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.models.quantized_weights import PackedRows
from worker_proc.startup.build import choose_quantization, make_runner

CPU = torch.device("cpu")
PAGE_SIZE = 16
PAGES = NUM_SLOTS * CONTEXT // PAGE_SIZE
KINDS = (Kind.Q4_0, Kind.Q5_1, Kind.Q8_0)


def load(files: ModelFiles, packed: bool, dtype: torch.dtype = torch.float32) -> Model:
    return load_model(files, dtype, CPU, packed)


def mixed(name: str) -> Kind:
    """Mix several types in one model, also in the parts of fused matrices."""
    kinds = {"attn_v": Kind.Q8_0, "attn_q": Kind.Q5_0, "ffn_gate": Kind.Q4_1, "output": Kind.F16}
    return next((kind for part, kind in kinds.items() if f"{part}." in name), Kind.Q4_0)


def llama(directory: Path) -> Path:
    """Write a model with untied embeddings and biases."""
    return tiny_llama(
        directory, tie=False, attention_bias=True, mlp_bias=True, intermediate_size=160
    )


@pytest.mark.parametrize("build", [tiny_gpt2, llama])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_permuted_and_transposed_matrices_have_the_numbers_of_the_dense_model(
    kind: Kind, build: Callable[[Path], Path], tmp_path: Path
) -> None:
    files = gguf_of(build(tmp_path), lambda name: kind)
    dense = dict(load(files, packed=False).named_modules())
    seen = 0
    for name, layer in load(files, packed=True).named_modules():
        if isinstance(layer, Linear | Embedding) and layer.weight.shape[1] % GROUP_SIZE == 0:
            rows = NativeMatrix(list(layer.blocks)).look_up()
            assert torch.equal(rows, dense[name].weight), name
            seen += 1
    assert seen == (2 if build is tiny_gpt2 else 14)


def phi3(directory: Path) -> Path:
    """Write a model whose rows of weights are whole blocks, with fused projections."""
    return tiny_phi3(directory, hidden_size=192, intermediate_size=160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", [tiny_gpt2, llama, phi3])
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
        drive(Compared(ours, theirs, QUANTIZED_TOLERANCE), dtype, PAGE_SIZE, seed=10)


def test_a_fused_matrix_with_a_part_in_float16_becomes_dense_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"blk.1.attn_v.weight": Kind.F16}
    files = gguf_of(llama(tmp_path), lambda name: kinds.get(name, Kind.Q4_0))
    layers = dict(load(files, packed=True).named_modules())
    dense = dict(load(files, packed=False).named_modules())
    name = "blocks.1.qkv_proj"
    assert layers[name].blocks == ()
    assert "2 quantized tensors are fused with one in 16 or 32 bits" in caplog.text
    assert torch.equal(layers[name].weight, dense[name].weight)
    assert len(layers["blocks.0.qkv_proj"].blocks) == 3


def test_a_type_that_is_not_multiplied_as_stored_is_refused_by_name(tmp_path: Path) -> None:
    files = gguf_of(llama(tmp_path))
    assert files.tensor_index is not None
    index = json.loads(files.tensor_index.read_text())
    index["blk.1.attn_v.weight"]["type"] = "IQ2_XXS"
    files.tensor_index.write_text(json.dumps(index))
    message = r"tiny\.gguf: tensor blk\.1\.attn_v\.weight has type IQ2_XXS.*Q4_K.*none"
    with pytest.raises(ModelError, match=message):
        load(files, packed=True)
    with pytest.raises(ModelError, match=message):
        check_servable(files, "gguf")
    check_servable(files)


def test_positions_that_are_added_and_never_multiplied_are_not_kept_packed(tmp_path: Path) -> None:
    data = quantize(torch.randn(8, 64).numpy(), Kind.Q8_0)
    rows, expected = PackedRows("Q8_0", torch.from_numpy(data)), dequantize(data, Kind.Q8_0)
    file, index = tmp_path / "a.gguf", tmp_path / "a.json"
    file.write_bytes(np.asarray(rows.data).tobytes())
    entry = {"type": "Q8_0", "shape": [8, 64], "offset": 0, "bytes": rows.data.numel()}
    index.write_text(json.dumps({"position_embd.weight": entry, "token_embd.weight": entry}))
    tensors = dict(from_gguf(file, index, {"model_type": "gpt2"}, packed=True))
    assert isinstance(tensors["wte.weight"], PackedRows)
    wpe = tensors["wpe.weight"]
    assert isinstance(wpe, Tensor)
    assert torch.equal(wpe, torch.from_numpy(expected))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_tensors_that_are_not_quantized_have_the_numbers_of_the_package(
    tmp_path: Path, kind: str
) -> None:
    data = quantize(np.random.default_rng(3).normal(size=(4, 32)).astype(np.float32), Kind[kind])
    stored = data.view(np.uint8)
    (file := tmp_path / "model.gguf").write_bytes(stored.tobytes())
    entry = {"type": kind, "shape": [4, 32], "offset": 0, "bytes": stored.nbytes}
    (index := tmp_path / "tensors.json").write_text(json.dumps({"output.weight": entry}))
    (read,) = dict(from_gguf(file, index, {"model_type": "gpt2"})).values()
    assert isinstance(read, Tensor)
    assert torch.equal(read, torch.from_numpy(dequantize(data, Kind[kind])))


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


def test_a_gguf_without_quantized_matrices_is_refused_with_what_to_take_instead(
    tmp_path: Path,
) -> None:
    files = gguf_of(llama(tmp_path), lambda name: Kind.F16)
    with pytest.raises(ConfigError, match=r"no matrix of .*tiny\.gguf is quantized.*int8 or int4"):
        load(files, packed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_beyond_the_models_ids_are_not_read(packed: bool, tmp_path: Path) -> None:
    """An embedding and a head of different lengths have the ids of the shorter one."""
    files = gguf_of(tiny_llama(tmp_path, tie=False))
    shorter = dataclasses.replace(files, config=files.config | {"vocab_size": 500})
    whole, cut = (
        load_model(of, torch.float32, torch.device("cpu"), packed) for of in (files, shorter)
    )
    for name in ("embedding", "lm_head"):
        wide, narrow = getattr(whole, name), getattr(cut, name)
        if packed:
            (wide,), (narrow,) = wide.blocks, narrow.blocks
            assert torch.equal(narrow.dense(), wide.dense()[:500])
        else:
            assert torch.equal(narrow.weight, wide.weight[:500])


@pytest.mark.parametrize(
    ("flags", "expected", "said"),
    [
        ({}, "gguf", ""),
        ({"dtype": "bfloat16"}, "gguf", ""),
        ({"quantization": "gguf", "dtype": "float32"}, "gguf", ""),
        ({"quantization": "none"}, "none", ""),
        ({"dtype": "float32"}, "none", "--dtype float32 asks for exact products"),
        ({"speculative_method": "self"}, "none", "--speculative-method self"),
        ({"attention_backend": "torch"}, "none", "as plain torch does not multiply them"),
    ],
)
def test_a_quantized_gguf_stays_as_stored_where_it_can_and_the_log_says_why_it_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: Any, expected: str, said: str
) -> None:
    files, config = gguf_of(llama(tmp_path), mixed), ServerConfig().replace(**flags)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert choose_quantization(config, files, torch.bfloat16, CPU) == expected
    assert said in caplog.text and bool(caplog.text) == bool(said)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.F32])
def test_a_gguf_without_quantized_tensors_is_dense_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    files = gguf_of(llama(tmp_path), lambda _: kind)
    caplog.set_level(logging.INFO)
    caplog.clear()
    assert choose_quantization(ServerConfig(), files, torch.bfloat16, CPU) == "none"
    assert not caplog.text


def test_a_type_that_the_kernels_lack_makes_a_gguf_dense_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = gguf_of(llama(tmp_path))
    assert files.tensor_index is not None
    index = json.loads(files.tensor_index.read_text())
    index["blk.1.attn_v.weight"]["type"] = "IQ2_XXS"
    files.tensor_index.write_text(json.dumps(index))
    assert choose_quantization(ServerConfig(), files, torch.bfloat16, CPU) == "none"
    assert "blk.1.attn_v.weight has type IQ2_XXS" in caplog.text


def test_the_start_says_the_bits_and_bytes_of_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    files = gguf_of(llama(tmp_path), mixed)
    config = ServerConfig().replace(max_total_tokens=256, max_running_requests=1)
    runner = make_runner(config, files)
    assert runner.quantization == "gguf"
    assert re.search(r"as stored in the GGUF \(.*Q4_1.*\), [\d.]+ bits each", caplog.text)
    caplog.clear()
    runner = make_runner(config.replace(quantization="none"), files)
    assert runner.quantization == "none" and "(--quantization gguf)" in caplog.text
