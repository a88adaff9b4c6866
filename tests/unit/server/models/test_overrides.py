"""--tokenizer, --chat-template and --revision: what they replace, and one line for each mistake."""

from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError, ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models import resolve as model_source
from quadriga.server.models import sources
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests.unit.tiny_gguf import write_tiny_gguf


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "cached_snapshot", lambda *_: None)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def tokenizer(gguf_file: Path, tmp_path: Path) -> Path:
    """A directory that holds a tokenizer and no model."""
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    for file in resolve_model(ModelArgs(str(gguf_file))).tokenizer_dir.glob("tokenizer*.json"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


@pytest.fixture
def bare_model(tmp_path: Path) -> Path:
    """What `save_pretrained` of a model leaves: no tokenizer."""
    directory = tmp_path / "bare"
    directory.mkdir()
    (directory / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def again(files: ModelFiles) -> ModelFiles:
    """What a child process makes of the launcher's result."""
    return resolve_model(ModelArgs(**files.location_flags))


def test_a_tokenizer_replaces_that_which_the_model_lacks(bare_model: Path, tokenizer: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; name one with --tokenizer"):
        resolve_model(ModelArgs(str(bare_model)))
    for source in (tokenizer, tokenizer / "tokenizer.json"):
        files = resolve_model(ModelArgs(str(bare_model), tokenizer=str(source)))
        assert files.tokenizer_dir == tokenizer and files.weights == bare_model
        assert again(files).tokenizer_dir == tokenizer


def test_a_gguf_lends_its_tokenizer(bare_model: Path, gguf_file: Path) -> None:
    files = resolve_model(ModelArgs(str(bare_model), tokenizer=str(gguf_file)))
    assert (files.tokenizer_dir / "tokenizer.json").is_file()
    assert again(files).tokenizer_dir == files.tokenizer_dir


def test_random_weights_take_the_given_tokenizer_and_no_stand_in(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "builtin_weights", lambda *_: pytest.fail("fetched"))
    args = ModelArgs("gpt2", tokenizer=str(tokenizer), load_format="dummy")
    files = resolve_model(args)
    assert files.tokenizer_dir == tokenizer and files.notes == ()


def test_a_chat_template_reaches_the_children(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    files = resolve_model(ModelArgs(str(gguf_file), chat_template="chat.jinja"))
    assert files.chat_template == tmp_path / "chat.jinja"
    assert again(files).chat_template == files.chat_template


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"tokenizer": "./nowhere"}, "--tokenizer ./nowhere: there is no such file or directory"),
        ({"tokenizer": "bare"}, "--tokenizer bare: the directory has no tokenizer.json"),
        ({"chat_template": "no.jinja"}, "no.jinja cannot be read: No such file or directory"),
    ],
)
def test_a_replacement_that_is_not_there_is_one_line(
    flags: dict[str, Any],
    complaint: str,
    gguf_file: Path,
    bare_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=complaint) as caught:
        resolve_model(ModelArgs(str(gguf_file), **flags))
    assert "\n" not in str(caught.value)


def test_a_revision_of_a_model_that_is_no_hub_id_is_an_error(gguf_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--revision is v1, but --model .* is not fetched"):
        resolve_model(ModelArgs(str(gguf_file), revision="v1"))


def test_the_hub_is_asked_for_the_revision_and_errors_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub

    asked = []

    def no_such_revision(_: Any, model: str, revision: str | None, timeout: float) -> None:
        asked.append((model, revision))
        raise ConnectionError("404")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_such_revision)
    with pytest.raises(ModelError, match="cannot get 'some/model at revision v1'"):
        resolve_model(ModelArgs("some/model", revision="v1"))
    assert asked == [("some/model", "v1")]


def test_children_use_the_snapshot_of_the_revision_without_asking_for_it(
    bare_model: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in tokenizer.iterdir():
        (bare_model / file.name).write_bytes(file.read_bytes())
    asked = []

    def snapshot_of(*names: str) -> Path:
        asked.append(names)
        return bare_model

    monkeypatch.setattr(sources, "cached_snapshot", snapshot_of)
    files = resolve_model(ModelArgs("some/model", revision="v1"))
    assert asked == [("some/model", "v1")]
    assert files.location_flags["revision"] == ""
    assert again(files).location == str(bare_model)
