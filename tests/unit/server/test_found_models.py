"""The models of --models-dir: those that cannot be served leave the others."""

from pathlib import Path

import pytest

from launcher import find_models
from quadriga.errors import QuadrigaError
from quadriga.server.config.parser import ServerParser
from quadriga.server.config.served_models import ModelSet, from_namespace
from tests.tiny_models import tiny_gpt2, tiny_llama

ENDPOINT = "tcp://127.0.0.1:5600"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of a model that cannot be served, before two that can be."""
    models = tmp_path / "models"
    (models / "broken").mkdir(parents=True)
    (models / "broken" / "config.json").write_text("{}")
    tiny_llama(models / "llama")
    tiny_gpt2(models / "second")
    return models


def parse(*arguments: str) -> ModelSet:
    flags = ["--endpoint", ENDPOINT, *arguments]
    return from_namespace(ServerParser("serve").parse_flags(flags))


def test_a_model_of_a_directory_that_cannot_be_served_is_left_out(
    directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = find_models(parse("--models-dir", str(directory)), shows_progress=False)
    assert [(model.name, model.config.frontend.endpoint) for model, _ in found] == [
        ("llama", ENDPOINT),
        ("second", "tcp://127.0.0.1:5601"),
    ]
    assert [model.preload for model, _ in found] == [None, False]
    assert [files.weights is not None for _, files in found] == [True, True]
    assert "model broken is left out: " in capfd.readouterr().err


def test_a_model_that_was_named_must_be_served(directory: Path) -> None:
    models = parse("broken", "--models-dir", str(directory))
    with pytest.raises(QuadrigaError):
        find_models(models, shows_progress=False)


def test_a_directory_of_which_nothing_can_be_served_is_an_error(directory: Path) -> None:
    for name in ("llama", "second"):
        (directory / name / "config.json").write_text("{}")
    with pytest.raises(QuadrigaError):
        find_models(parse("--models-dir", str(directory)), shows_progress=False)
