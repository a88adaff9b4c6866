"""The server's info describes the model's files."""

from pathlib import Path

import pytest

from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.model_info import details_from_info, details_to_info
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import tiny_gpt2, tiny_llama
from tests.unit.tiny_gguf import write_tiny_gguf
from tokenizer_proc.info import model_details


def test_a_directory_is_described(tmp_path: Path) -> None:
    files = resolve_model(ModelArgs(model=str(tiny_llama(tmp_path / "model"))))
    details = model_details(files)
    assert (details.family, details.container, details.weight_format) == (
        "llama", "safetensors", "F32",
    )  # fmt: skip
    assert details.num_bytes == 4 * details.num_parameters > 0
    assert details.digest == files.fingerprint and details.modified_at > 0
    assert details.dimensions["num_hidden_layers"] == files.config["num_hidden_layers"]
    assert details_from_info(details_to_info(details)) == details


def test_gpt2s_dimensions_have_the_common_names(tmp_path: Path) -> None:
    files = resolve_model(ModelArgs(model=str(tiny_gpt2(tmp_path / "model"))))
    assert model_details(files).dimensions["hidden_size"] == files.config["n_embd"]


def test_a_gguf_and_random_weights_are_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    gguf = resolve_model(ModelArgs(model=str(write_tiny_gguf(tmp_path / "tiny.gguf"))))
    assert model_details(gguf).container == "gguf"
    directory = str(tiny_llama(tmp_path / "model"))
    random = resolve_model(ModelArgs(model=directory, load_format="dummy"))
    assert (model_details(random).container, model_details(random).num_bytes) == ("", 0)
