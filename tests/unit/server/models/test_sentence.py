"""Directories of sentence-transformers: embedders with prompts, and cross-encoders."""

import json
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import InvalidRequest, ModelError
from quadriga.sampling.pooling import IDENTITY, MEAN, SIGMOID, SOFTMAX
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.models.formats.sentence import has_modules
from quadriga.server.models.resolve import ModelFiles, resolve_model
from tests.tiny_encoders import CLASSIFIERS, tiny_bert

TRANSFORMER = "sentence_transformers.models.Transformer"
MEAN_POOLING = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def write(directory: Path, **files: Any) -> None:
    """Write JSON files by their names without an end, in which "__" is for a slash."""
    for name, content in files.items():
        path = directory / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))


def embedder(directory: Path, pooling: dict[str, Any], **settings: Any) -> Path:
    tiny_bert(directory)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": TRANSFORMER},
        {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    write(
        directory, modules=modules, config_sentence_transformers=settings,
        sentence_bert_config={"max_seq_length": 32}, **{"1_Pooling__config": pooling},
    )  # fmt: skip
    return directory


def resolved(directory: Path) -> ModelFiles:
    return resolve_model(ModelArgs(model=str(directory)))


def test_a_prompt_is_chosen_by_its_name_or_is_the_default_one(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "document": "", "own": None}
    model = resolved(embedder(tmp_path / "a", MEAN_POOLING, prompts=prompts))
    assert (model.pooling, model.context_length) == (MEAN, 32)
    assert [model.prompt_before(name) for name in (None, "", "query", "document", "own")] == [
        "", "", "query: ", "", "",
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="the model has the prompts query, document, own"):
        model.prompt_before("passage")
    model = resolved(
        embedder(tmp_path / "b", MEAN_POOLING, prompts=prompts, default_prompt_name="query")
    )
    assert [model.prompt_before(name) for name in (None, "")] == ["query: ", ""]
    with pytest.raises(InvalidRequest, match="the model has no prompts"):
        resolved(embedder(tmp_path / "c", MEAN_POOLING)).prompt_before("query")


def test_what_is_not_served_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="default_prompt_name = 'none', which is not in prompts"):
        resolved(embedder(tmp_path / "a", MEAN_POOLING, default_prompt_name="none"))
    with pytest.raises(ModelError, match="include_prompt = false"):
        resolved(embedder(tmp_path / "b", MEAN_POOLING | {"include_prompt": False}))
    with pytest.raises(ModelError, match="pooling_mode_max_tokens"):
        resolved(embedder(tmp_path / "c", {"pooling_mode_max_tokens": True}))
    directory = CLASSIFIERS["bert"](tmp_path / "d")
    write(
        directory, config_sentence_transformers={"model_type": "CrossEncoder"},
        modules=[{"type": TRANSFORMER}, {"type": "sentence_transformers.models.Dense"}],
    )  # fmt: skip
    with pytest.raises(ModelError, match="has the module 'Dense'"):
        resolved(directory)
    write(
        directory, modules=[{"type": "x.LogitScore", "path": "1"}],
        **{"1__config": {"true_token_id": None}},
    )  # fmt: skip
    with pytest.raises(ModelError, match="true_token_id = None"):
        resolved(directory)


def test_a_cache_without_the_files_of_modules_is_not_complete(tmp_path: Path) -> None:
    directory = embedder(tmp_path / "model", MEAN_POOLING)
    assert has_modules(directory)
    (directory / "1_Pooling" / "config.json").unlink()
    assert not has_modules(directory)
    (directory / "modules.json").unlink()
    assert has_modules(directory)


@pytest.mark.parametrize(
    ("named", "activation"),
    [
        ({}, SIGMOID),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, IDENTITY),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            IDENTITY,
        ),
        ({"sentence_transformers": {"version": "4.1.0"}}, SIGMOID),
        ({"id2label": {"0": "no", "1": "yes"}}, SOFTMAX),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, SIGMOID),
    ],
)
def test_the_activation_of_scores_is_what_the_model_names(
    named: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    directory = CLASSIFIERS["bert"](tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    config.pop("sbert_ce_default_activation_function")
    write(directory, config=config | named)
    scores = resolved(directory).scores
    assert scores is not None
    assert scores.activation == activation
    settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    write(directory, config_sentence_transformers=settings)
    scores = resolved(directory).scores
    assert scores is not None
    assert scores.activation == IDENTITY


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, "'torch.nn.Tanh'"),
        ({"id2label": {"0": "a", "2": "b"}}, "not one for each number"),
        ({"id2label": None, "num_labels": 0}, "num_labels = 0"),
    ],
)
def test_labels_and_activations_that_are_none_are_refused(
    named: dict[str, Any], words: str, tmp_path: Path
) -> None:
    directory = CLASSIFIERS["bert"](tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    write(directory, config=config | named)
    with pytest.raises(ModelError, match=words):
        resolved(directory)
