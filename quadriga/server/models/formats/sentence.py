"""Directories of sentence-transformers: what becomes of a model's output.

An embedder's hidden states become the vector of a text, and a cross-encoder's logits the score of a
pair of texts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quadriga.errors import ModelError
from quadriga.sampling.pooling import CLS, LAST, MEAN, WEIGHTED_MEAN
from quadriga.server.models.families.classifier import LogitScore
from quadriga.server.models.formats.dense_modules import DenseConfig, read_dense
from quadriga.server.models.formats.directory import read_json, read_text

MODULES = "modules.json"
# Our name of each pooling that 1_Pooling/config.json can switch on.
POOLING_MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_weightedmean_tokens": WEIGHTED_MEAN,
    "pooling_mode_lasttoken": LAST,
}
# In this order. Clients ask for normalized vectors or not, whatever the directory says.
SERVED_MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
SCORING_MODULES = ("Transformer", "LogitScore")
MODULES_WITH_FILES = ("Pooling", "Dense", "LogitScore")
SETTINGS = "config_sentence_transformers.json"


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """What a directory says of the vectors, or the scores, of its model.

    Attributes:
        pooling: one of POOLINGS; "": of a cross-encoder.
        max_tokens: longest text, in tokens; None: the model's context.
        activation: of scores, as sentence-transformers names it; "": it names none.
        logit_score: how the scores are read from a model that makes text; None: it has a head.
        dense: layers over the pooled vector, in their order.
        prompts: what can be put before a text, by name.
        default_prompt: name of the one that is, if a request does not say it; "": none is.
    """

    pooling: str
    max_tokens: int | None
    activation: str = ""
    logit_score: LogitScore | None = None
    dense: tuple[DenseConfig, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""


def read_sentence_config(directory: Path) -> SentenceConfig | None:
    """Return what a directory says of its output; None if it is not of sentence-transformers.

    Raises:
        ModelError: a module, or the pooling, is not supported.
    """
    settings = read_json(directory / SETTINGS)
    is_ranker = settings.get("model_type") == "CrossEncoder"
    if not (directory / MODULES).is_file() and not is_ranker:
        return None
    if is_ranker:
        return _ranker(directory, settings)
    pooling, dense = _vector_modules(directory)
    prompts = _prompts_of(settings)
    default = str(settings.get("default_prompt_name") or "")
    if default and default not in prompts:
        raise ModelError(
            f"{directory / SETTINGS} has default_prompt_name = {default!r}, which is not in prompts"
        )
    return SentenceConfig(
        pooling, _max_tokens(directory), dense=dense, prompts=prompts, default_prompt=default
    )


def _vector_modules(directory: Path) -> tuple[str, tuple[DenseConfig, ...]]:
    """Return how a vector is pooled, and the layers over it. Raise ModelError."""
    pooling, before = "", 0
    dense: list[DenseConfig] = []
    for module in _modules_of(directory / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in SERVED_MODULES:
            raise ModelError(
                f"{directory / MODULES} has the module {kind!r}; served are"
                f" {', '.join(SERVED_MODULES)}"
            )
        if SERVED_MODULES.index(kind) < before:
            raise ModelError(
                f"{directory / MODULES} has the module {kind!r} after"
                f" {SERVED_MODULES[before]!r}; served is the order {', '.join(SERVED_MODULES)}"
            )
        before = SERVED_MODULES.index(kind)
        path = directory / str(module.get("path", ""))
        if kind == "Pooling":
            pooling = _pooling_of(path / "config.json")
        elif kind == "Dense":
            dense.append(read_dense(path))
    if not pooling:
        raise ModelError(f"{directory / MODULES} has no module Pooling: its texts have no vector")
    return pooling, tuple(dense)


def has_modules(directory: Path) -> bool:
    """Return whether a directory has the files of the modules that it names. Raise ModelError."""
    if not (directory / MODULES).is_file():
        return True
    paths = [
        str(module.get("path", ""))
        for module in _modules_of(directory / MODULES)
        if str(module.get("type", "")).endswith(MODULES_WITH_FILES)
    ]
    return all((directory / path / "config.json").is_file() for path in paths)


def _ranker(directory: Path, settings: dict[str, Any]) -> SentenceConfig:
    """Return what a cross-encoder's directory says of its scores. Raise ModelError."""
    modules = _modules_of(directory / MODULES) if (directory / MODULES).is_file() else []
    score = None
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in SCORING_MODULES:
            raise ModelError(
                f"{directory / MODULES} has the module {kind!r}; served in a cross-encoder are"
                f" {', '.join(SCORING_MODULES)}"
            )
        if kind == "LogitScore":
            path = directory / str(module.get("path", "")) / "config.json"
            instruction = _prompts_of(settings).get(str(settings.get("default_prompt_name")), "")
            score = _logit_score(path, instruction)
    activation = str(settings.get("activation_fn") or "")
    return SentenceConfig("", _max_tokens(directory), activation, score)


def _prompts_of(settings: dict[str, Any]) -> dict[str, str]:
    prompts = settings.get("prompts")
    if not isinstance(prompts, dict):
        return {}
    return {str(name): str(text or "") for name, text in prompts.items()}


def _logit_score(path: Path, instruction: str) -> LogitScore:
    config = read_json(path)
    true, false = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(true, int) or not isinstance(false, int | None) or min(true, false or 0) < 0:
        raise ModelError(
            f"{path} has true_token_id = {true!r} and false_token_id = {false!r}; they should be"
            " ids of tokens"
        )
    return LogitScore(true, false, instruction)


def _max_tokens(directory: Path) -> int | None:
    limit = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    return limit if isinstance(limit, int) and limit > 0 else None


def _modules_of(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(read_text(path), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the file again") from None


def _pooling_of(path: Path) -> str:
    config = read_json(path)
    if config.get("include_prompt") is False:
        raise ModelError(
            f"{path} has include_prompt = false: vectors without the tokens of a prompt are not"
            " served"
        )
    modes = [name for name, value in config.items() if name.startswith("pooling_mode") and value]
    known = [POOLING_MODES[name] for name in modes if name in POOLING_MODES]
    if named := _named_mode(config):
        return named
    if len(known) != 1 or len(modes) != 1:
        raise ModelError(
            f"{path} switches on {', '.join(modes) or 'no pooling'}; one of"
            f" {', '.join(POOLING_MODES)} is served"
        )
    return known[0]


def _named_mode(config: dict[str, Any]) -> str:
    """Return the pooling of the newer form, in which `pooling_mode` has its name."""
    named = {"cls": CLS, "mean": MEAN, "weightedmean": WEIGHTED_MEAN, "lasttoken": LAST}
    return named.get(str(config.get("pooling_mode")), "")
