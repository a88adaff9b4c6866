"""The identity of an adapter and its first check, which need no torch."""

import json
import struct
import subprocess
import sys
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.models.adapters.content import adapter_id, check_adapter, read_content
from quadriga.server.models.adapters.peft_config import parse_config

NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
          "base_model_name_or_path": "org/model"}  # fmt: skip


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]], **changes: Any) -> bytes:
    """Return a file of tensors, each with its type, shape and bytes, in their order."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += values
    text = json.dumps(header | changes).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_adapter(directory: Path, weights: bytes | None = None, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    (directory / "adapter_model.safetensors").write_bytes(weights or safetensors(TENSORS))
    return directory


TENSORS = {
    NAME.format("A"): ("F32", [2, 3], struct.pack("<6f", *range(6))),
    NAME.format("B"): ("F32", [4, 2], struct.pack("<8f", *range(8))),
}


def test_equal_contents_have_one_identity(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first")
    backwards = safetensors(dict(reversed(TENSORS.items())), __metadata__={"format": "pt"})
    second = write_adapter(
        tmp_path / "second", backwards, base_model_name_or_path="/a/path", lora_dropout=0.1
    )
    (second / "README.md").write_text("trained")
    assert adapter_id(first) == adapter_id(str(second))
    assert len(adapter_id(first)) == 64


def test_whatever_changes_answers_changes_the_identity(tmp_path: Path) -> None:
    other = {**TENSORS, NAME.format("B"): ("F32", [4, 2], struct.pack("<8f", *range(1, 9)))}
    bits = {**TENSORS, NAME.format("A"): ("F16", [2, 3], bytes(12))}
    adapters = [
        write_adapter(tmp_path / "plain"),
        write_adapter(tmp_path / "alpha", lora_alpha=5),
        write_adapter(tmp_path / "stabilized", use_rslora=True),
        write_adapter(tmp_path / "pattern", alpha_pattern={"q_proj": 5}),
        write_adapter(tmp_path / "values", safetensors(other)),
        write_adapter(tmp_path / "types", safetensors(bits)),
    ]
    assert len({adapter_id(adapter) for adapter in adapters}) == len(adapters)


def test_a_content_stays_when_its_files_change(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter")
    content, before = read_content(directory), adapter_id(directory)
    write_adapter(directory, lora_alpha=5)
    assert content.id == before != adapter_id(directory)


def test_the_first_check_reads_the_headers(tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "adapter", rank_pattern={"k_proj": 8})
    summary = check_adapter(directory, max_rank=8)
    assert (summary.base, summary.rank) == ("org/model", 8)
    assert summary.num_bytes == (directory / "adapter_model.safetensors").stat().st_size
    with pytest.raises(ModelError, match=f"{directory}: it has rank 8, and --max-lora-rank is 7"):
        check_adapter(directory, max_rank=7)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (safetensors(TENSORS)[:-1], "cut short"),
        (safetensors(TENSORS)[:20], "cut short"),
        (b"1234", "cut short: it has 4 bytes"),
        (b"\xff" * 64, "no safetensors file"),
        (struct.pack("<Q", 8) + b"no json!", "header is damaged"),
        (struct.pack("<Q", 2) + b"[]", "header is damaged"),
        (safetensors({"a": ("F32", [2, 2], bytes(8))}), "header is damaged: of 'a'"),
        (safetensors({"a": ("F32", [-1, -2], bytes(8))}), "header is damaged: of 'a'"),
        (safetensors({"a": ("I64", [1], bytes(8))}), "its tensor 'a' is 'I64'; supported: F64"),
        (safetensors(TENSORS, b={"dtype": "F32"}), "header is damaged"),
    ],
)
def test_a_damaged_file_is_refused_before_it_is_loaded(
    weights: bytes, message: str, tmp_path: Path
) -> None:
    directory = write_adapter(tmp_path / "adapter", weights)
    for read in (check_adapter, adapter_id):
        with pytest.raises(ModelError, match=message) as raised:
            read(directory)
        assert str(directory) in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "it has no tensors of LoRA"),
        ({"base_model.model.a.lokr_w1.weight": ("F32", [], bytes(4))}, "lokr_w1.weight', which is"),
        ({"base_model.model.a.lora_E": ("F32", [], bytes(4))}, "lora_E', which is none of LoRA"),
    ],
)
def test_tensors_of_other_methods_are_refused_by_their_names(
    tensors: dict[str, tuple[str, list[int], bytes]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        check_adapter(write_adapter(tmp_path / "adapter", safetensors(tensors)))


def test_a_file_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no such file or directory"):
        check_adapter(tmp_path / "none")
    with pytest.raises(ModelError, match="has no adapter_config"):
        check_adapter(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"a GGUF is named itself, such as .*a\.gguf"):
        check_adapter(tmp_path)
    with pytest.raises(ModelError, match=r"a\.gguf"):
        check_adapter(tmp_path / "a.gguf")


WEIRD: list[Any] = [None, True, 0, -1, 2.5, 10**30, 10**400, float("inf"), float("nan"), "", "x",
         "(", "(a+)+$", [], [1], ["x"], [[]], {}, {"x": 1}, {"x": None}, {"(": 1}]  # fmt: skip
FIELDS = ["alpha_pattern", "base_model_name_or_path", "bias", "exclude_modules",
          "init_lora_weights", "layers_to_transform", "lora_alpha", "modules_to_save", "peft_type",
          "r", "rank_pattern", "target_modules", "target_parameters", "trainable_token_indices",
          "use_dora", "use_rslora"]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_any_value_of_a_field_is_read_or_refused(field: str) -> None:
    module = "model.layers.0.self_attn.q_proj"
    for value in WEIRD:
        with suppress(ModelError):
            config = parse_config(json.dumps({**CONFIG, field: value}).encode())
            assert isfinite(config.scaling_of(module))
            config.is_excluded(module)


def test_reading_an_adapter_loads_no_torch() -> None:
    code = (
        "import sys, quadriga.server.models.adapters.content\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'safetensors')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
