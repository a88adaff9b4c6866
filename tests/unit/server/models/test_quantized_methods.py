"""Which quantized checkpoints are supported, and in which words the others are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.cli.models import check_model
from quadriga.server.models.formats.quantization import read_quantization
from tests.tiny_models import tiny_llama
from tests.unit.quantized_checkpoint import (
    AWQ_CONFIG,
    FORMATS,
    NF4_CONFIG,
    compressed,
    gptq_config,
    quantize_checkpoint,
    weights,
)

GROUPS = weights("int", 4, "group", group_size=128)
CT = compressed("pack-quantized", GROUPS)


def read(config: dict[str, Any]) -> Any:
    return read_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (gptq_config(4, 128), "gptq, 4 bits, groups of 128"),
        (gptq_config(8, -1), "gptq, 8 bits, a scale for each row or matrix"),
        (AWQ_CONFIG | {"group_size": 64}, "awq, 4 bits, groups of 64"),
        (CT, "compressed-tensors, 4 bits, groups of 128"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            "fp8, 8 bits, blocks of 128x128",
        ),
        (NF4_CONFIG, "bitsandbytes, 4 bits, groups of 64"),
    ],
)
def test_method_and_bits_are_named(config: dict[str, Any], shown: str) -> None:
    assert str(read(config)) == shown


def test_an_unquantized_model_has_none() -> None:
    assert read_quantization({}) is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method = 'hqq'; supported: awq, bitsandbytes"),
        (gptq_config(3, 128), "bits = 3; supported: 4, 8"),
        ({"quant_method": "gptq", "group_size": 128}, "bits = None; supported: 4, 8"),
        (gptq_config(4, 48), "group_size = 48; supported: 128, 64, 32, -1"),
        (gptq_config(4, 128, checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
        (gptq_config(4, 128, dynamic={r"+:.*\.mlp": {"bits": 8}}), r"dynamic = '+:.*\\.mlp'"),
        (AWQ_CONFIG | {"version": "gemv"}, "version = 'gemv'; supported: gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
        (
            NF4_CONFIG | {"bnb_4bit_quant_storage": "bfloat16"},
            "bnb_4bit_quant_storage = 'bfloat16'",
        ),
        (CT | {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config = 'sparse-24"),
        (compressed("int-quantized", GROUPS | {"num_bits": 2}), "group_0.num_bits = 2"),
    ],
)
def test_a_refusal_is_one_line_with_key_value_and_remedy(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError) as refused:
        read(config)
    text = str(refused.value)
    assert f"quantization_config.{words}" in text or words in text
    assert "take another checkpoint" in text
    assert "\n" not in text


def test_a_layer_gets_the_scheme_of_its_name_before_that_of_an_expression_or_its_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": GROUPS},
        "b": {"targets": [r"re:.*\.mlp\..*"], "weights": GROUPS | {"num_bits": 8}},
        "c": {"targets": ["model.0.mlp.up"], "weights": GROUPS | {"group_size": 32}},
    }
    quantization = read(CT | {"config_groups": groups})
    schemes = [quantization.scheme_of(f"model.0.{layer}") for layer in ("q", "mlp.down", "mlp.up")]
    assert [(s.bits, s.group_size) for s in schemes] == [(4, 128), (8, 128), (4, 32)]


@pytest.mark.parametrize("name", ["gptq 4 bits", "awq", "int-quantized", "fp8, blocks", "nf4"])
def test_models_check_shows_the_method_and_counts_weights_not_words(
    name: str, tmp_path: Path
) -> None:
    expected = check_model(str(tiny_llama(tmp_path / "dense", tie=False))).num_parameters
    quantize_checkpoint(tiny_llama(tmp_path / "coded", tie=False), *FORMATS[name])
    report = check_model(str(tmp_path / "coded"))
    assert report.is_servable, report.refusal
    assert report.quantization == str(read(FORMATS[name][1]))
    assert report.num_parameters == expected
    if report.way == "native kernels":
        assert [mode.name for mode in report.modes] == ["as stored", "bfloat16", "float32"]


def test_a_refused_checkpoint_is_named_with_its_directory(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": gptq_config(3, 128)}
    path.write_text(json.dumps(config))
    refusal = check_model(str(tmp_path)).refusal
    assert refusal.startswith(str(tmp_path))
    assert "quantization_config.bits = 3" in refusal
