"""The file with the list of a server's models."""

import stat
from pathlib import Path

import pytest

from quadriga.errors import ConfigError
from quadriga.server.config.server_config import ServerConfig, from_argv
from quadriga.server.model_list import ModelEntry, check_models, read_models, write_models

CHAT = ModelEntry(
    name="chat",
    endpoint="ipc:///run/chat/public",
    aliases=["gpt-4o"],
    flags=["--model", "tiny", "--max-batch-size", "3"],
)
ENCODER = ModelEntry(name="encoder", endpoint="ipc:///run/encoder/public")


def test_a_list_is_read_as_it_was_written_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    write_models(path, [ENCODER])
    write_models(path, [CHAT, ENCODER])
    assert read_models(path) == [CHAT, ENCODER]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["models.json"]


def test_the_flags_of_a_model_are_a_config_of_its_own() -> None:
    config = from_argv(CHAT.flags)
    assert config == ServerConfig().replace(model="tiny", max_batch_size=3)
    assert from_argv(ENCODER.flags) == ServerConfig()
    assert from_argv(config.to_argv()) == config


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--max-batch-size", "many"], "argument --max-batch-size"),
        (["--max-batch-size", "0"], "max_batch_size must be"),
    ],
)
def test_flags_that_cannot_work_are_an_error_and_no_exit(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_argv(flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "is no list of models"),
        ('[{"name": "a"}]', "missing required field `endpoint`"),
        ('[{"name": "a", "endpoint": "", "alias": "b"}]', "unknown field `alias`"),
        ("[]", "the list of models is empty"),
    ],
)
def test_a_broken_file_says_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "models.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_models(path)


@pytest.mark.parametrize("names", [("a", "y"), ("b", "a"), ("b", "x")])
def test_two_models_of_one_name_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    first = ModelEntry(name="a", endpoint="", aliases=["x"])
    second = ModelEntry(name=names[0], endpoint="", aliases=[names[1]])
    with pytest.raises(ConfigError, match=r"two models are called '[ax]': give"):
        check_models([first, second])
    with pytest.raises(ConfigError, match="two models are called"):
        write_models(tmp_path / "models.json", [first, second])
    assert not list(tmp_path.iterdir())


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty name"):
        check_models([ModelEntry(name="a", endpoint="", aliases=[""])])
