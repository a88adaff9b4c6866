"""Files that are odd are read, or refused in one line that names the file and the field."""

import codecs
import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFEndian, GGUFValueType, GGUFWriter
from gguf.scripts.gguf_convert_endian import convert_byteorder  # noqa: F401  the remedy exists
from transformers import AutoConfig

from quadriga.errors import ModelError, QuadrigaError
from quadriga.server.cli.models import check_model
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.families.architectures import CONFIGS, read_architecture
from quadriga.server.models.formats.gguf_reader import checked_metadata, read_header
from quadriga.server.models.formats.quantization import read_quantization
from quadriga.server.models.formats.tokenizer import load_tokenizer, tokenizer_json
from quadriga.server.models.model_impl import check_servable
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import tiny_llama
from tests.unit.tiny_gguf import write_tiny_gguf
from tokenizer_proc.info import model_details
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.prepare import sampling_defaults

ODD: list[Any] = [None, True, 0, -1, 3, 10**9, 2**63, 1.5, 1e400, "", "512", [], [1], ["x"], [[1]],
                  {}, {"x": 1}, {"content": "a"}]  # fmt: skip
# Fields that are read and that the tiny model's files do not have.
MORE = {
    "config.json": ("layer_types", "auto_map", "quantization_config", "text_config", "n_positions"),
    "generation_config.json": ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    "tokenizer_config.json": ("response_template", "fill_tokens", "added_tokens_decoder",
                              "additional_special_tokens", "extra_special_tokens", "image_token"),
    "tokenizer.json": (),
    "special_tokens_map.json": ("eos_token", "additional_special_tokens", "extra_special_tokens"),
    "added_tokens.json": ("<x>",),
    "model.safetensors.index.json": ("weight_map", "metadata"),
}  # fmt: skip
BROKEN = [b"", b" ", b"{", b"[]", b"null", b"3", b"\xff\xfe", b"[" * 100_000, b'{"a":\xff}']


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("odd") / "model")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))


def start(directory: Path) -> None:
    """Read everything that the launcher and the frontend read before a server is ready."""
    files = resolve_model(ModelArgs(str(directory), model_impl="native"))
    check_servable(files)
    load_tokenizer(files.tokenizer_dir)
    ChatTemplate(files.tokenizer_dir)
    sampling_defaults("model", files.generation_config)
    tokenizer_json(files.tokenizer_dir)
    model_details(files)
    assert isinstance(files.eos_token_ids, frozenset)


def refusal(directory: Path) -> str:
    """Return the error of a start; "" if there is none. Anything else than an error is raised."""
    return error_of(lambda: start(directory))


def error_of(call: Callable[[], object]) -> str:
    """Return the QuadrigaError of a call as one line; "" if there is none."""
    try:
        call()
    except QuadrigaError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", MORE)
def test_a_field_of_another_type_is_read_or_refused_by_its_name(
    model: Path, tmp_path: Path, name: str
) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    file = directory / name
    content = json.loads(file.read_text()) if file.exists() else {}
    if name == "model.safetensors.index.json":
        content = {"weight_map": {"a": "model.safetensors"}}
    for field in (*content, *MORE[name]):
        for value in ODD:
            file.write_text(json.dumps({**content, field: value}))
            if error := refusal(directory):
                assert name in error or str(directory) in error, (field, value, error)
                is_own = name != "tokenizer.json"  # the library names places in it
                assert not is_own or field in error or "lacks" in error, (field, value, error)


@pytest.mark.parametrize("name", MORE)
def test_a_broken_file_is_refused_by_its_name(model: Path, tmp_path: Path, name: str) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    for data in BROKEN:
        (directory / name).write_bytes(data)
        assert name in refusal(directory), data[:20]
        assert name in check_model(str(directory)).refusal


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_files_with_a_byte_order_mark_are_read(model: Path, tmp_path: Path, encoding: str) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    for file in directory.glob("*.json"):
        file.write_text(file.read_text(encoding="utf-8"), encoding=encoding)
        assert not file.read_bytes().startswith(b"{")
    (directory / "chat_template.jinja").write_bytes(codecs.BOM_UTF8 + b"x")
    assert refusal(directory) == check_model(str(directory)).refusal == ""


@pytest.mark.parametrize("value", ["2", "</s>", [[2]], {"id": 2}, True, 1.0, [None]])
def test_an_end_token_that_is_no_id_is_refused_by_its_name(
    model: Path, tmp_path: Path, value: Any
) -> None:
    for name in ("config.json", "generation_config.json"):
        directory = shutil.copytree(model, tmp_path / name)
        content = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(content | {"eos_token_id": value}))
        expected = f"the model's {name} has eos_token_id = {value!r}; it should be a token id, or a"
        assert refusal(directory).startswith(f"{directory}: {expected}")


@pytest.mark.parametrize("family", CONFIGS)
def test_no_value_of_a_config_is_read_as_another_type(family: str) -> None:
    """A value of another type is refused in one line, for every family."""
    base = AutoConfig.for_model(family).to_dict() | {"model_type": family}
    for field in (*base, "rope_scaling", "sliding_window", "layer_types"):
        for value in ODD:
            changes = [{field: value}]
            if isinstance(base.get(field), dict):
                changes += [{field: base[field] | {key: value}} for key in (*base[field], "factor")]
            for change in changes:
                error = error_of(partial(read_architecture, base | change))
                assert not error or "config.json" in error or "model" in error


SETTINGS: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {}},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": {},
     "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Linear"]}}},
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings["quant_method"])
def test_quantization_settings_of_another_type_are_refused_by_name(
    settings: dict[str, Any],
) -> None:
    def changed(value: dict[str, Any]) -> list[dict[str, Any]]:
        changes = [value | {key: odd} for key in value for odd in ODD]
        for key, nested in value.items():
            if isinstance(nested, dict):
                changes += [value | {key: change} for change in changed(nested)]
        return changes

    for change in changed(deepcopy(settings)):
        error = error_of(partial(read_quantization, {"quantization_config": change}))
        assert not error or error.startswith("config.json has quantization_config.")


@pytest.mark.parametrize(
    "shards", [{"a": 1}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": ""}]
)
def test_an_index_names_files_of_its_directory_only(
    model: Path, tmp_path: Path, shards: dict[str, Any]
) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": shards}))
    assert refusal(directory) == (
        f"cannot read {file}: weight_map.a is {shards['a']!r}, and should be a map of tensors to"
        " files in this directory"
    )


def test_weights_that_are_cut_short_are_refused_by_their_file(model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model, tmp_path / "model")
    file = directory / "model.safetensors"
    data = file.read_bytes()
    for part in (b"", data[:7], data[:8], data[:100], data[: len(data) // 2], data[:-1], b"<html>"):
        file.write_bytes(part)
        error = check_model(str(directory)).refusal
        assert error.startswith(f"cannot read {file}: ") and error.endswith("fetch the file again")
        model_details(resolve_model(ModelArgs(str(directory))))


# --- GGUF -----------------------------------------------------------------------------------------


LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


@pytest.mark.parametrize("name", LAYERS)
def test_equal_values_of_layers_are_one_and_others_are_refused_by_name(name: str) -> None:
    metadata = {"general.architecture": "llama", f"llama.{name}": [4, 4, 4]}
    assert checked_metadata(metadata)[f"llama.{name}"] == 4
    with pytest.raises(ModelError, match=rf"llama.{name} is \[4, 8\]: it differs between the"):
        checked_metadata(metadata | {f"llama.{name}": [4, 8]})


def test_a_gguf_with_a_value_for_each_layer_is_read_as_one_with_a_single_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = resolve_model(ModelArgs(str(write_tiny_gguf(tmp_path / "plain.gguf")))).config
    add = GGUFWriter.add_key_value

    def with_layers(self: GGUFWriter, key: str, value: Any, kind: Any, *rest: Any) -> None:
        if key.removeprefix("llama.") in LAYERS:
            value, kind = [value], GGUFValueType.ARRAY
        add(self, key, value, kind, *rest)

    monkeypatch.setattr(GGUFWriter, "add_key_value", with_layers)
    path = write_tiny_gguf(tmp_path / "layers.gguf")
    assert read_header(path).metadata["llama.attention.head_count_kv"] == 2
    assert resolve_model(ModelArgs(str(path))).config == plain


def test_a_big_endian_gguf_is_named_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=rf"^{path}: the file is a GGUF in big-endian order.*gguf-"
    ):
        resolve_model(ModelArgs(str(path)))
    assert "gguf-convert-endian" in check_model(str(path)).refusal


def test_a_gguf_value_of_another_type_is_refused_by_its_key(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", add_bos=True, fill={"fim_pre": 0})
    metadata = read_header(path).metadata
    for key in metadata:
        if key.startswith("general.") and key != "general.architecture":
            continue
        is_number = isinstance(metadata[key], float)
        for value in (True, -1, 1.5, "x", [1, 2], ["a"], 2**63):
            changed = metadata | {key: value}
            if error := error_of(partial(checked_metadata, changed)):
                assert error.startswith(f"{key} is ")
            else:
                allowed = (int, float) if is_number else type(metadata[key])
                assert isinstance(checked_metadata(changed)[key], allowed)
