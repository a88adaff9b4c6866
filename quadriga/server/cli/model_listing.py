"""The models that are on this machine, and the one that a server serves."""

from dataclasses import dataclass
from pathlib import Path

from quadriga.client import Client
from quadriga.errors import ModelError, QuadrigaError
from quadriga.server.models.formats.directory import read_json
from quadriga.server.models.formats.gguf_reader import read_architecture_name
from quadriga.server.models.sources import (
    BUILTINS,
    BuiltinModel,
    cached_builtin_weights,
    cached_models,
)
from quadriga.server.models.weights import weight_files

CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A row of the table.

    Attributes:
        name: a value of --model, or the served name.
        where: built-in, Hub cache, or the server's endpoint.
        architecture: as its files name it; "" if unknown.
        num_bytes: bytes of the weights; None if they are not here.
    """

    name: str
    where: str
    architecture: str = ""
    num_bytes: int | None = None


def local_models() -> list[ListedModel]:
    """Return the built-in models and those of the Hub's cache, without a network."""
    builtins = [_from_catalog(model) for model in BUILTINS.values()]
    return builtins + [_from_hub(name, path) for name, path in cached_models().items()]


def served_model(endpoint: str, curve_dir: str | None) -> ListedModel | None:
    """Return the model of the server at an address; None if no server answers."""
    try:
        with Client(endpoint, connect_timeout=CONNECT_TIMEOUT_S, curve_dir=curve_dir) as client:
            return ListedModel(str(client.info(ANSWER_TIMEOUT_S)["model"]), f"served at {endpoint}")
    except QuadrigaError:
        return None


def _from_catalog(model: BuiltinModel) -> ListedModel:
    weights = cached_builtin_weights(model.name)
    if weights is None:
        return ListedModel(model.name, f"built-in, not fetched yet ({model.download_mb} MB)")
    architecture = read_architecture_name(weights) or ""
    return ListedModel(model.name, "built-in", architecture, weights.stat().st_size)


def _from_hub(name: str, path: Path) -> ListedModel:
    try:
        architecture = str(read_json(path / "config.json").get("model_type") or "")
    except ModelError:
        architecture = "unreadable config.json"
    files = [file for file in weight_files(path) if file.is_file()]
    num_bytes = sum(file.stat().st_size for file in files) if files else None
    return ListedModel(name, "Hub cache", architecture, num_bytes)
