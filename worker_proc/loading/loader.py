"""A model with its weights on its device, in its dtype."""

from collections import defaultdict

import torch
from torch import Tensor

from quadriga.errors import ConfigError, ModelError
from quadriga.model_files.resolve import ModelFiles
from worker_proc.loading.checkpoints import (
    NamedTensors,
    fill_at_random,
    from_gguf,
    from_safetensors,
)
from worker_proc.loading.gguf_blocks import PackedRows
from worker_proc.loading.sharding import WHOLE, TPRank, WeightSharder, memory_of
from worker_proc.models.base import Model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.models.registry import build_model

MAX_NAMES_SHOWN = 5


@torch.inference_mode()
def load_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = False,
    part: TPRank = WHOLE,
) -> Model:
    """Read the weights straight into their places: fused, transposed and converted on the way.

    part: of the model, that is to be here. packed: the quantised matrices of a GGUF become the
    `blocks` of their layers, whose weights are never touched then. Raises ModelError where the
    architecture is not supported, or where tensors are missing, left over or of another shape;
    ConfigError where there is nothing packed.
    """
    if packed and (files.weights is None or files.tensor_index is None):
        raise ConfigError(
            f"quantization gguf keeps what a GGUF has packed, but {files.location} is not read from"
            " one: leave it out, or take int8 or int4, which round any model"
        )
    model = build_model(files.config, dtype, device, part.count)
    if files.weights is None:
        fill_at_random(model)
    else:
        fill(model, _source(files, packed, device), files.location, part)
    if packed and not any(layer.blocks for layer in _layers(model)):
        raise ConfigError(
            f"quantization gguf keeps what a GGUF has packed, but no matrix of {files.location} is"
            " quantised: leave it out, or take int8 or int4, which round any model"
        )
    model.finish_loading(files.context_length)
    return model.eval()


def _source(files: ModelFiles, packed: bool, device: torch.device) -> NamedTensors:
    assert files.weights is not None
    if files.tensor_index is not None:
        return from_gguf(files.weights, files.tensor_index, files.config, packed)
    return from_safetensors(files.weights, device)


def fill(model: Model, source: NamedTensors, location: str, part: TPRank = WHOLE) -> None:
    """Copy each tensor, or this part of it, to its place, or keep it packed. Every place must be
    filled, and no tensor left over."""
    places = model.checkpoint_tensors()
    shares = WeightSharder(model, part)
    filled: set[str] = set()
    unexpected = []
    packed: list[tuple[Tensor, PackedRows]] = []
    for stored_name, tensor in source:
        name = model.map_weight_name(stored_name)
        if name is None:
            continue
        if name not in places:
            unexpected.append(stored_name)
            continue
        if isinstance(tensor, PackedRows):
            place = _rows_of(places[name])
            _check_shape(tensor, place, stored_name, location)
            packed.append((place, tensor))
        else:
            tensor = shares.of(tensor, places[name])
            _check_shape(tensor, places[name], stored_name, location)
            places[name].copy_(tensor)
        filled.add(name)
    missing = [name for name in places if name not in filled]
    for what, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            raise ModelError(f"{location} {what} {len(names)} tensors: {_shown(names)}")
    _keep_packed(model, packed)


def _rows_of(place: Tensor) -> Tensor:
    """Rows of a parameter, [outputs, inputs], whichever way round the checkpoint has them."""
    return place if place.stride(-1) == 1 else place.t()


def _check_shape(tensor: Tensor | PackedRows, place: Tensor, name: str, location: str) -> None:
    if tuple(tensor.shape) != tuple(place.shape):
        raise ModelError(
            f"{location}: tensor {name} is {list(tensor.shape)}, but config.json asks for"
            f" {list(place.shape)}"
        )


def _keep_packed(model: Model, packed: list[tuple[Tensor, PackedRows]]) -> None:
    """A layer has blocks where all of its rows are packed; beside dense rows they become dense."""
    parts = defaultdict(list)
    for place, rows in packed:
        parts[memory_of(place)].append((place, rows))
    for layer in _layers(model):
        own = sorted(parts[memory_of(layer.weight)], key=lambda part: part[0].storage_offset())
        if sum(len(place) for place, _ in own) == len(layer.weight):
            layer.blocks = tuple(rows for _, rows in own)
        else:
            for place, rows in own:
                place.copy_(rows.dense())


def _layers(model: Model) -> list[Linear | Embedding]:
    return [layer for layer in model.modules() if isinstance(layer, Linear | Embedding)]


def _shown(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
