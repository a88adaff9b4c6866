"""Load the modules `Dense` of sentence-transformers, which follow the pooling of a vector."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.server.models.formats.dense_modules import WEIGHTS, DenseConfig
from quadriga.server.models.resolve import ModelFiles

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class DenseModule:
    """activation(x Wᵀ + b) of one vector x, in float32: its bits depend on nothing else."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self._weight, self._bias = weight, bias
        self._activation = _ACTIVATIONS[activation]

    def __call__(self, vector: Tensor) -> Tensor:
        """Return the vector `[out_features]` of one `[in_features]`."""
        return self._activation(F.linear(vector, self._weight, self._bias))


def load_dense_modules(files: ModelFiles, device: torch.device) -> Sequence[DenseModule]:
    """Return the modules of a model's directory in their order, on a device.

    Without weights they are random, as the model's are.

    Raises:
        ModelError: a file is missing or damaged, or has other tensors than its config.json says.
    """
    configs = () if files.sentence is None else files.sentence.dense
    if files.weights is None:
        return [_at_random(config, device) for config in configs]
    return [_load(config, device) for config in configs]


def _load(config: DenseConfig, device: torch.device) -> DenseModule:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = config.directory / WEIGHTS
    if not path.is_file():
        raise ModelError(f"{config.directory} has no {WEIGHTS}; other formats are not read")
    try:
        stored = load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}; fetch the file again") from None
    shapes = {"linear.weight": [config.out_features, config.in_features]}
    if config.bias:
        shapes["linear.bias"] = [config.out_features]
    found = {name: list(tensor.shape) for name, tensor in stored.items()}
    if found != shapes:
        raise ModelError(f"{path} has the tensors {found}, but its config.json asks for {shapes}")
    bias = stored["linear.bias"].float() if config.bias else None
    return DenseModule(stored["linear.weight"].float(), bias, config.activation)


def _at_random(config: DenseConfig, device: torch.device) -> DenseModule:
    generator = torch.Generator().manual_seed(0)
    shape = (config.out_features, config.in_features)
    weight = torch.randn(shape, generator=generator) * config.in_features**-0.5
    bias = torch.zeros(config.out_features, device=device) if config.bias else None
    return DenseModule(weight.to(device), bias, config.activation)
