"""A model with its weights on its device, in its dtype."""

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.model_source import ModelFiles
from worker_proc.models.base import Model
from worker_proc.models.registry import build_model
from worker_proc.weights import NamedTensors, fill_at_random, from_gguf, from_safetensors

MOST_NAMES_SHOWN = 5


@torch.inference_mode()
def load_model(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> Model:
    """Read the weights straight into their places: fused, transposed and converted on the way.

    Raises ModelError where the architecture is not supported, or where tensors are missing, left
    over or of another shape.
    """
    model = build_model(files.config, dtype, device)
    if files.weights is None:
        fill_at_random(model)
    else:
        fill(model, _source(files), files.location)
    model.finish_loading(files.context_length)
    return model.eval()


def _source(files: ModelFiles) -> NamedTensors:
    assert files.weights is not None
    if files.tensor_index is not None:
        return from_gguf(files.weights, files.tensor_index, files.config)
    return from_safetensors(files.weights)


def fill(model: Model, source: NamedTensors, location: str) -> None:
    """Copy each tensor to its place. Every place must be filled, and no tensor left over."""
    places = model.checkpoint_tensors()
    filled: set[str] = set()
    unexpected = []
    for stored_name, tensor in source:
        name = model.canonical_name(stored_name)
        if name is None:
            continue
        if name not in places:
            unexpected.append(stored_name)
            continue
        _copy(tensor, places[name], stored_name, location)
        filled.add(name)
    missing = [name for name in places if name not in filled]
    for what, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            raise ModelError(f"{location} {what} {len(names)} tensors: {_shown(names)}")


def _copy(tensor: Tensor, place: Tensor, name: str, location: str) -> None:
    if tensor.shape != place.shape:
        raise ModelError(
            f"{location}: tensor {name} is {list(tensor.shape)}, but config.json asks for"
            f" {list(place.shape)}"
        )
    place.copy_(tensor)


def _shown(names: list[str]) -> str:
    more = len(names) - MOST_NAMES_SHOWN
    return ", ".join(names[:MOST_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
