"""Modules `Dense` of sentence-transformers: layers over the pooled vector of a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.errors import ModelError
from quadriga.server.models.formats.directory import read_json

WEIGHTS = "model.safetensors"
VECTOR = "sentence_embedding"  # sentence-transformers' name of what such a module reads and writes
MAX_FEATURES = 1_000_000
# By the last part of the name of a class of torch.nn.
ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A linear layer with an activation.

    Attributes:
        directory: of its files.
        in_features, out_features: elements of a vector before and after it.
        bias: it has a bias.
        activation: a value of ACTIVATIONS.
    """

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


def read_dense(directory: Path) -> DenseConfig:
    """Read the config.json of a module.

    Raises:
        ModelError: a value is not supported.
    """
    path = directory / "config.json"
    config = read_json(path)
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = str(name).rpartition(".")[2]
    if not str(name).startswith("torch.nn.") or kind not in ACTIVATIONS:
        raise ModelError(
            f"{path} has activation_function = {str(name)[:100]!r}; supported: "
            + ", ".join(ACTIVATIONS)
        )
    for key, allowed in (
        ("module_input_name", (VECTOR, None)),
        ("module_output_name", (VECTOR, None)),
        ("use_residual", (False, None)),
    ):
        if config.get(key) not in allowed:
            raise ModelError(f"{path} has {key} = {config[key]!r:.100}; supported: {allowed[0]!r}")
    has_bias = config.get("bias", True)
    if not isinstance(has_bias, bool):
        raise ModelError(f"{path} has bias = {has_bias!r:.100}; it should be true or false")
    return DenseConfig(
        directory,
        _size(path, config, "in_features"),
        _size(path, config, "out_features"),
        has_bias,
        ACTIVATIONS[kind],
    )


def check_sizes(modules: tuple[DenseConfig, ...], hidden_size: int) -> None:
    """Raise ModelError unless each module reads as many elements as the one before it returns.

    Args:
        modules: in their order.
        hidden_size: elements of a hidden state of the model.
    """
    size = hidden_size
    for module in modules:
        if module.in_features != size:
            raise ModelError(
                f"{module.directory / 'config.json'} has in_features = {module.in_features}, and"
                f" the vectors before it have {size} elements; fetch the directory again"
            )
        size = module.out_features


def _size(path: Path, config: dict[str, Any], key: str) -> int:
    size = config.get(key)
    if type(size) is not int or not 1 <= size <= MAX_FEATURES:
        raise ModelError(
            f"{path} has {key} = {size!r:.100}; it should be a number from 1 to {MAX_FEATURES}"
        )
    return size
