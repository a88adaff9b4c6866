"""Directories of sentence-transformers: how a model's hidden states become the vector of a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quadriga.errors import ModelError
from quadriga.sampling.pooling import CLS, LAST, MEAN, WEIGHTED_MEAN
from quadriga.server.models.formats.directory import read_json, read_text

MODULES = "modules.json"
# Our name of each pooling that 1_Pooling/config.json can switch on.
POOLING_MODES = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_weightedmean_tokens": WEIGHTED_MEAN,
    "pooling_mode_lasttoken": LAST,
}
# Clients ask for normalized vectors or not, whatever the directory says.
SERVED_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """What a directory says of the vectors of its model.

    Attributes:
        pooling: one of POOLINGS.
        max_tokens: longest text, in tokens; None: the model's context.
    """

    pooling: str
    max_tokens: int | None


def read_sentence_config(directory: Path) -> SentenceConfig | None:
    """Return what a directory says of vectors; None if it is not one of sentence-transformers.

    Raises:
        ModelError: a module, or the pooling, is not supported.
    """
    if not (directory / MODULES).is_file():
        return None
    pooling = ""
    for module in _modules_of(directory / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in SERVED_MODULES:
            raise ModelError(
                f"{directory / MODULES} has the module {kind!r}; served are"
                f" {', '.join(SERVED_MODULES)}"
            )
        if kind == "Pooling":
            pooling = _pooling_of(directory / str(module.get("path", "")) / "config.json")
    if not pooling:
        raise ModelError(f"{directory / MODULES} has no module Pooling: its texts have no vector")
    limit = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    return SentenceConfig(pooling, limit if isinstance(limit, int) and limit > 0 else None)


def _modules_of(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(read_text(path), type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the file again") from None


def _pooling_of(path: Path) -> str:
    config = read_json(path)
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
