"""Modules Dense of sentence-transformers: what their files say, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import ModelError
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.formats.sentence import has_modules
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests.tiny_encoders import tiny_bert
from tests.tiny_modules import DENSE, POOLING, write_json, write_modules

GOOD: dict[str, Any] = {
    "in_features": 48, "out_features": 24, "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny_bert(tmp_path / "model")


def resolved(directory: Path) -> ModelFiles:
    return resolve_model(ModelArgs(model=str(directory)))


def test_the_last_module_says_how_long_vectors_are(directory: Path) -> None:
    assert resolved(directory).vector_size == 48
    identity = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False}
    back = GOOD | identity | {"in_features": 24, "out_features": 100}
    write_modules(directory, [GOOD, back])
    files = resolved(directory)
    assert files.vector_size == 100
    assert files.sentence is not None
    first, second = files.sentence.dense
    assert (first.activation, first.bias) == ("tanh", True)
    assert (second.activation, second.bias) == ("identity", False)


def test_a_missing_activation_is_that_of_the_library(directory: Path) -> None:
    write_modules(directory, [{"in_features": 48, "out_features": 8}])
    sentence = resolved(directory).sentence
    assert sentence is not None
    assert (sentence.dense[0].activation, sentence.dense[0].bias) == ("tanh", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"in_features": 40}, "in_features = 40, and the vectors before it have 48"),
        ({"out_features": None}, "out_features = None"),
        ({"out_features": 0}, "out_features = 0; it should be a number from 1"),
        ({"out_features": True}, "out_features = True"),
        ({"bias": "yes"}, "bias = 'yes'; it should be true or false"),
        ({"activation_function": "mine.Squash"}, "activation_function = 'mine.Squash'"),
        ({"activation_function": "mine.Tanh"}, "activation_function = 'mine.Tanh'"),
        ({"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings'"),
        ({"use_residual": True}, "use_residual = True; supported: False"),
    ],
)
def test_what_is_not_served_is_refused_with_its_value(
    changes: dict[str, Any], message: str, directory: Path
) -> None:
    write_modules(directory, [GOOD | changes])
    with pytest.raises(ModelError, match=message):
        resolved(directory)


def test_a_module_in_another_place_is_refused(directory: Path) -> None:
    write_modules(directory, [GOOD])
    write_json(directory / "modules.json", [DENSE | {"path": "2_Dense"}, POOLING])
    with pytest.raises(ModelError, match="the module 'Pooling' after 'Dense'"):
        resolved(directory)


def test_a_cache_without_the_module_is_not_complete(directory: Path) -> None:
    write_modules(directory, [GOOD])
    assert has_modules(directory)
    (directory / "2_Dense" / "config.json").unlink()
    assert not has_modules(directory)
