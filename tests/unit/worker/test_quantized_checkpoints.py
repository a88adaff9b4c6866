"""Quantized checkpoints are read exactly, whatever the method that wrote them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests.tiny_models import tiny_llama
from tests.unit.quantized_checkpoint import (
    FORMATS,
    NF4_CONFIG,
    gptq,
    gptq_config,
    nf4,
    quantize_checkpoint,
)
from worker_proc.loading.loader import load_model
from worker_proc.startup.build import choose_quantization

CPU = torch.device("cpu")


def tiny_quantized(directory: Path, name: str, **changes: Any) -> ModelFiles:
    tiny_llama(directory, tie=False, **changes)
    write, config = FORMATS[name]
    quantize_checkpoint(directory, write, config)
    return resolve_model(ModelArgs(model=str(directory)))


@pytest.mark.parametrize("name", FORMATS)
def test_the_values_of_every_format_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    changes = {"mlp_bias": True, "attention_bias": True}
    values = quantize_checkpoint(tiny_llama(tmp_path, tie=False, **changes), *FORMATS[name])
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    targets = load_model(files, torch.float32, CPU).checkpoint_tensors()
    assert targets.keys() == values.keys()
    for tensor_name, expected in values.items():
        assert torch.equal(targets[tensor_name], expected), tensor_name


def test_a_block_that_crosses_rows_is_read_exactly(tmp_path: Path) -> None:
    values = quantize_checkpoint(tiny_llama(tmp_path), nf4(double=False, block=64), NF4_CONFIG)
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    model = load_model(files, torch.float32, CPU, packed=True)
    name = "model.layers.0.mlp.down_proj.weight"
    assert values[name].shape[1] % 64
    assert torch.equal(model.checkpoint_tensors()[name], values[name])


def test_layers_of_one_shape_from_several_files_are_put_together(tmp_path: Path) -> None:
    values = quantize_checkpoint(tiny_llama(tmp_path), *FORMATS["awq"])
    file = tmp_path / "model.safetensors"
    tensors = sorted(load_file(file).items(), key=lambda item: item[0][::-1])
    half = len(tensors) // 2
    shards = {"a.safetensors": dict(tensors[:half]), "b.safetensors": dict(tensors[half:])}
    for shard, part in shards.items():
        save_file(part, tmp_path / shard)
    index = {name: shard for shard, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    file.unlink()
    files = resolve_model(ModelArgs(model=str(tmp_path)))
    targets = load_model(files, torch.float32, CPU).checkpoint_tensors()
    assert all(torch.equal(targets[name], values[name]) for name in targets)


def test_a_missing_part_of_a_layer_is_named(tmp_path: Path) -> None:
    files = tiny_quantized(tmp_path, "gptq 4 bits")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.qzeros"]
    save_file(tensors, file)
    with pytest.raises(
        ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.qzeros"
    ):
        load_model(files, torch.float32, CPU)


def test_a_group_size_that_is_not_that_of_the_tensors_is_refused(tmp_path: Path) -> None:
    quantize_checkpoint(tiny_llama(tmp_path), gptq(4, 32), gptq_config(4, 32))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = gptq_config(4, -1)
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"g_idx|scales of shape"):
        load_model(resolve_model(ModelArgs(model=str(tmp_path))), torch.float32, CPU)


def test_groups_of_unequal_sizes_are_refused(tmp_path: Path) -> None:
    files = tiny_quantized(tmp_path, "gptq 4 bits, act order")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.g_idx"][:] = 0
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"up_proj\.g_idx with groups of unequal sizes"):
        load_model(files, torch.float32, CPU)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    files = tiny_quantized(tmp_path, "awq")
    for flag in ("int8", "int4", "gguf"):
        config = ServerConfig().replace(quantization=flag)
        with pytest.raises(ConfigError, match=rf"--quantization {flag} .*awq, 4 bits.*leave"):
            choose_quantization(config, files, torch.float32, CPU)


@pytest.mark.parametrize(
    ("flags", "expected", "said"),
    [
        ({}, "checkpoint", "multiplied as they are"),
        ({"quantization": "none"}, "none", "as --quantization none asks for it"),
        ({"dtype": "float32"}, "none", "as --dtype float32 asks for exact products"),
        ({"attention_backend": "torch"}, "none", "as plain torch does not multiply them"),
    ],
)
def test_a_quantized_checkpoint_stays_as_stored_where_the_kernels_can_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: Any, expected: str, said: str
) -> None:
    caplog.set_level(logging.INFO)
    files, config = tiny_quantized(tmp_path, "awq"), ServerConfig().replace(**flags)
    assert choose_quantization(config, files, torch.bfloat16, CPU) == expected
    assert "awq, 4 bits, groups of 32" in caplog.text and said in caplog.text
