"""Several models of one server: their names, their own flags, and what each has to itself."""

from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.parser import ServerParser
from quadriga.server.config.served_models import ModelSet, from_namespace, without

FILE = """
chat:
  model: smollm2-135m
  aliases: [gpt-4o-mini, default]
  max-batch-size: 16
  context_length: 1024
all-minilm-l6-v2:
coder:
  model: org/coder
  dp: 2
  tool-call-parser: none
"""


def parse(line: str) -> ModelSet:
    return from_namespace(ServerParser("serve").parse_flags(line.split()))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(FILE)
    return path


def test_a_file_gives_each_model_its_name_its_aliases_and_its_own_flags(file: Path) -> None:
    shared, models = parse(f"--models {file} --max-batch-size 32 --port 80")
    assert [model.name for model in models] == ["chat", "all-minilm-l6-v2", "coder"]
    assert models[0].aliases == ["gpt-4o-mini", "default"]
    configs = [model.config for model in models]
    assert [c.model.model for c in configs] == ["smollm2-135m", "all-minilm-l6-v2", "org/coder"]
    assert [c.model.shown_name for c in configs] == ["chat", "all-minilm-l6-v2", "coder"]
    assert [c.scheduler.max_batch_size for c in configs] == [16, 32, 32]
    assert [c.replicas.dp for c in configs] == [1, 1, 2]
    assert [c.model.context_length for c in configs] == [1024, None, None]
    assert configs[2].frontend.tool_call_parser == "none"
    assert {c.http.port for c in (*configs, shared)} == {80}
    assert all(c.model.models == "" for c in configs)


def test_models_share_no_endpoint_no_journal_and_no_directory_of_pages() -> None:
    flags = "--journal /j --kv-cache-dir /kv --endpoint tcp://127.0.0.1:5000"
    shared, models = parse(f"a org/b {flags}")
    first, second = (model.config for model in models)
    assert first.frontend.endpoint == shared.frontend.endpoint == "tcp://127.0.0.1:5000"
    assert second.frontend.endpoint == "tcp://127.0.0.1:5001"
    assert (first.scheduler.journal, second.scheduler.journal) == ("/j/a", "/j/org-b")
    assert (first.worker.kv_cache_dir, second.worker.kv_cache_dir) == ("/kv/a", "/kv/org-b")
    assert shared.scheduler.journal == "/j"  # the gateway's data is below it
    of_file = parse("a org/b --endpoint ipc:///run/q").models
    endpoints = [model.config.frontend.endpoint for model in of_file]
    assert endpoints == ["ipc:///run/q", "ipc:///run/q.org-b"]


def test_one_model_keeps_what_the_flags_say() -> None:
    (model,) = parse("a --journal /j --endpoint tcp://127.0.0.1:5000").models
    assert model.config.scheduler.journal == "/j"
    assert model.config.frontend.endpoint == "tcp://127.0.0.1:5000"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty: it must be a map of models"),
        ("- a", "must be a map of models, such as `chat:"),
        ("a: b", "'a' is no model's name with a map"),
        ("a: {port: 80}", "a: port is a flag of the whole server"),
        ("a: {journal: /j}", "journal is a flag of the whole server"),
        ("a: {max-bach-size: 3}", "no flag 'max-bach-size'; near it: max-batch-size"),
        ("a: {max-batch-size: x}", "a: max-batch-size is 'x'"),
        ("a: {max-batch-size: 0}", "max_batch_size must be positive"),
        ("a: {aliases: b}", "aliases is 'b': it must be a list of names"),
        ("a: {aliases: [b]}\nb: {model: c}", "two models are called 'b', a and c"),
        ("a/b: {model: c}\na-b: {model: d}", "'a/b' and 'a-b' would have one directory, a-b"),
        ("' a': {model: c}", "give it a name without blanks"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(content: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint.replace("(", r"\(")):
        parse(f"--models {path}")


def test_contradictions_on_the_command_line_say_what_to_leave_out(file: Path) -> None:
    with pytest.raises(ConfigError, match="leave --model a out"):
        parse(f"a --models {file}")
    with pytest.raises(ConfigError, match="is the name of one model"):
        parse("a b --served-model-name c")
    with pytest.raises(ConfigError, match="two models are called 'gpt2'"):
        parse("--model gpt2 --model gpt2")
    with pytest.raises(ConfigError, match="model 2 needs port 65536"):
        parse("a b --endpoint tcp://127.0.0.1:65535")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of models, and of what is none."""
    models = tmp_path / "models"
    for name in ("chat/config.json", "embed/modules.json", "notes/readme.md"):
        (models / name).parent.mkdir(parents=True)
        (models / name).touch()
    for name in ("b.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "a.bin"):
        (models / name).touch()
    return models


FOUND = ["b.gguf", "big-00001-of-00002.gguf", "chat", "embed"]


def preloads_of(found: ModelSet) -> dict[str, bool | None]:
    return {model.name: model.preload for model in found.models}


def test_each_folder_and_each_gguf_of_a_directory_is_a_model(directory: Path) -> None:
    found = parse(f"--models-dir {directory} --journal /j --context-length 64")
    assert list(preloads_of(found)) == FOUND
    assert list(preloads_of(found).values()) == [None, False, False, False]
    assert [model.config.model.model for model in found.models] == [
        str(directory / name) for name in FOUND
    ]
    assert all(model.config.model.context_length == 64 for model in found.models)
    assert len({model.config.frontend.endpoint for model in found.models}) == 4
    assert found.models[2].config.scheduler.journal == "/j/chat"
    assert found.models[2].config.to_argv().count("--models-dir") == 0


@pytest.mark.parametrize("named", ["embed", "{}/embed"])
def test_named_models_come_before_those_of_the_directory(directory: Path, named: str) -> None:
    found = parse(f"gpt2 {named.format(directory)} --models-dir {directory}")
    assert list(preloads_of(found)) == ["gpt2", "embed", *FOUND[:3]]
    assert list(preloads_of(found).values()) == [None, None, False, False, False]
    assert found.models[1].config.model.model == str(directory / "embed")
    assert [model.is_found for model in found.models] == [False, False, True, True, True]


def test_an_entry_of_a_file_gives_flags_to_a_model_of_the_directory(
    directory: Path, tmp_path: Path
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(f"embed: {{context-length: 8}}\nalso: {{model: {directory}/chat}}")
    found = parse(f"--models {file} --models-dir {directory}")
    assert list(preloads_of(found)) == ["embed", "also", *FOUND[:2]]
    assert found.models[0].config.model.model == str(directory / "embed")
    assert found.models[0].config.model.context_length == 8


def test_a_model_that_is_left_out_leaves_no_gap_in_the_endpoints(directory: Path) -> None:
    found = parse(f"--models-dir {directory} --endpoint tcp://127.0.0.1:5555")
    rest = without([found.models[0], found.models[2]], found)
    assert [(model.name, model.config.frontend.endpoint) for model in rest] == [
        (FOUND[1], "tcp://127.0.0.1:5555"),
        (FOUND[3], "tcp://127.0.0.1:5556"),
    ]


def test_a_directory_without_a_model_says_so(directory: Path) -> None:
    with pytest.raises(ConfigError, match="has no model: no folder with"):
        parse(f"--models-dir {directory}/notes")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        parse(f"--models-dir {directory}/gone")
    with pytest.raises(ConfigError, match="is the name of one model"):
        parse(f"--models-dir {directory} --served-model-name a")


@pytest.mark.parametrize(
    "line",
    [
        "smollm2-135m --lora-modules a=/x,b=/y",
        "smollm2-135m --lora-modules a=/x b=/y",
        "--lora-modules a=/x b=/y --model smollm2-135m",
        '--lora-modules {"name":"a","path":"/x"} {"name":"b","path":"/y"}',
    ],
)
def test_adapters_may_be_apart_by_commas_or_blanks(line: str) -> None:
    (model,) = parse(line).models
    config = model.config
    assert config.model.model == "smollm2-135m"
    modules = config.model.adapter_modules
    assert [(module.name, module.path) for module in modules] == [("a", "/x"), ("b", "/y")]
