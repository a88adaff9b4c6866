"""Which models are refused before a process starts, and in which words."""

import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.formats.gguf_config import header_files
from quadriga.server.models.model_impl import (
    MAX_GROUP_SIZE,
    MAX_HEAD_DIM,
    check_native_heads,
    check_servable,
)
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import tiny_gpt2, tiny_llama
from tests.unit.tiny_gguf import write_tiny_gguf
from worker_proc.models.decoder import build_model

CSRC = Path("worker_proc/cpu/csrc")


def changed(directory: Path, **changes: Any) -> Path:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as refused:
        check_servable(resolve_model(ModelArgs(model=str(directory), model_impl="native")))
    return str(refused.value)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama])
def test_the_configuration_is_that_of_the_workers_model(build: Any, tmp_path: Path) -> None:
    files = resolve_model(ModelArgs(model=str(build(tmp_path / "model"))))
    config, shape = check_servable(files), build_model(files.config).attention_shape
    assert config is not None
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (
        shape.layers, shape.heads, shape.kv_heads, shape.head_dim,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "deberta-v2", "architectures": ["DebertaV2Model"]},
            "names deberta-v2, DebertaV2Model as its",
        ),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'; supported: silu, swish, gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "longest"}}, "rope_type = 'longest'; supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method = 'hqq'; supported: awq"),
    ],
)
def test_a_refusal_is_one_line_with_the_location(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    text = refusal(changed(tiny_llama(tmp_path / "model"), **changes))
    assert words in text
    assert str(tmp_path) in text
    assert "\n" not in text


def test_limits_of_heads_are_those_of_the_kernels() -> None:
    source = "".join(file.read_text() for file in CSRC.glob("*.h"))
    for name, value in (("MAX_HEAD_DIM", MAX_HEAD_DIM), ("MAX_GROUP_SIZE", MAX_GROUP_SIZE)):
        assert re.search(rf"constexpr int {name} = (\d+);", source)[1] == str(value)  # type: ignore[index]
    check_native_heads(8, 2, MAX_HEAD_DIM)
    with pytest.raises(ModelError, match="--attention-backend torch"):
        check_native_heads(8, 2, MAX_HEAD_DIM + 1)


def test_an_unsupported_gguf_is_refused_before_its_vocabulary_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "gguf", None)  # needed by the full reader
    name, value = b"general.architecture", b"mamba"
    path = tmp_path / "mamba.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 10, 10)
        + struct.pack("<Q", len(name)) + name
        + struct.pack("<IQ", 8, len(value)) + value
    )  # fmt: skip
    with pytest.raises(ModelError, match="is 'mamba', which is not supported in a GGUF"):
        header_files(path)


def test_a_gguf_whose_header_ends_early_is_named(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(ModelError, match=r"tiny.gguf is damaged or cut short"):
        header_files(path)


def test_sizes_that_do_not_divide_are_refused_at_once(tmp_path: Path) -> None:
    model = changed(tiny_llama(tmp_path / "model"), num_attention_heads=7, head_dim=None)
    assert "num_attention_heads = 7, which is no multiple of num_key_value_heads = 2" in refusal(
        model
    )


def test_an_adapter_is_refused_with_the_name_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/llama"}')
    with pytest.raises(ModelError, match="is an adapter of a/llama: serve that model"):
        resolve_model(ModelArgs(model=str(tmp_path)))
