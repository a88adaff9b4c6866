"""Load a model's weights onto its device, in its dtype, or keep them as they are stored."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from quadriga.errors import ConfigError, ModelError
from quadriga.server.models.families.architectures import read_architecture
from quadriga.server.models.formats.quantization import is_mxfp4, read_quantization
from quadriga.server.models.resolve import ModelFiles
from worker_proc.loading.checkpoints import (
    IsWanted,
    StoredHead,
    StoredTensors,
    every_tensor,
    fill_at_random,
    find_stored_head,
    from_gguf,
    from_safetensors,
    head_as_embedding,
    safetensors_files,
    with_mxfp4,
)
from worker_proc.loading.quantized_checkpoints import from_quantized
from worker_proc.loading.sharding import WHOLE, TPRank, WeightSharder, memory_of
from worker_proc.models.base import Model
from worker_proc.models.decoder import build_model
from worker_proc.models.layers import Embedding, Linear
from worker_proc.models.quantized_weights import CodedRows, PackedRows

GROUP_MULTIPLE = 32  # inputs that the kernels multiply together


QuantizedRows = PackedRows | CodedRows


def keep_quantized(
    layers: Iterable[Linear | Embedding], parts: Sequence[tuple[Tensor, QuantizedRows]]
) -> None:
    """Set the `blocks` or `coded` of each layer whose rows are all quantized alike.

    All other rows are dequantized.

    Args:
        layers: the layers that can keep quantized rows.
        parts: the rows of a parameter, as [outputs, inputs], and their quantized form.
    """
    of_layer: dict[int, list[tuple[Tensor, QuantizedRows]]] = defaultdict(list)
    for target, rows in sorted(parts, key=lambda part: part[0].storage_offset()):
        of_layer[memory_of(target)].append((target, rows))
    kept: list[CodedRows] = []
    for layer in layers:
        found = of_layer.get(memory_of(layer.weight), [])
        if sum(len(target) for target, _ in found) != len(layer.weight):
            continue
        blocks = tuple(rows for _, rows in found if isinstance(rows, PackedRows))
        coded = tuple(rows for _, rows in found if isinstance(rows, CodedRows))
        if coded and not _alike(coded):
            continue
        layer.blocks, layer.coded = blocks, coded
        kept += coded
        del of_layer[memory_of(layer.weight)]
    dense = [part for found in of_layer.values() for part in found]
    for target, rows in dense:
        target.copy_(rows.dense())
    _log_kept(kept, dense)


def _log_kept(kept: Sequence[CodedRows], dense: Sequence[tuple[Tensor, QuantizedRows]]) -> None:
    """Log how many matrices of a checkpoint stay quantized, and how many do not."""
    if kept:
        size = sum(rows.stored_bytes for rows in kept) / 1e6
        logging.info(
            "%d quantized matrices stay as the checkpoint has them: %.1f MB", len(kept), size
        )
    coded = [(target, rows) for target, rows in dense if isinstance(rows, CodedRows)]
    if coded:
        logging.warning(
            "%d quantized matrices are dequantized, %.1f MB instead of %.1f MB: groups of %d"
            " inputs, or fused with matrices of another format",
            len(coded),
            sum(target.numel() * target.element_size() for target, _ in coded) / 1e6,
            sum(rows.stored_bytes for _, rows in coded) / 1e6,
            coded[0][1].group_size,
        )
    elif dense:
        logging.warning(
            "%d quantized tensors are fused with one in 16 or 32 bits, and become dense like it",
            len(dense),
        )


def _alike(parts: Sequence[CodedRows]) -> bool:
    """Return whether the kernels can multiply these rows as one matrix."""
    first = parts[0]
    fits = first.group_size % GROUP_MULTIPLE == 0 or first.group_size == first.shape[1]
    return fits and all(
        part.kind is first.kind
        and part.group_size == first.group_size
        and _equal(part.table, first.table)
        and _equal(part.order, first.order)
        for part in parts[1:]
    )


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


MAX_NAMES_SHOWN = 5
MXFP4_BITS = 4.25  # of a weight, with its part of the scale


@torch.inference_mode()
def load_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool = False,
    rank: TPRank = WHOLE,
    take_weights: Callable[[Model], None] = lambda _: None,
) -> Model:
    """Build a model and read its weights, which are fused, transposed and converted on the way.

    Args:
        files: the model's files; without weights, the model gets random ones.
        dtype: of all weights that are not packed.
        device: of the weights.
        packed: keep quantized matrices as the `blocks` (of a GGUF) or `coded` (of a quantized
            checkpoint) of their layers, and leave the layers' weights untouched.
        rank: the part of the model to load.
        take_weights: called with the model when its weights have been read; may move and pack them.

    Raises:
        ModelError: the architecture is not supported, or tensors are missing, unexpected or of
            another shape.
        ConfigError: `packed` is set, but no matrix is quantized.
    """
    quantization, is_coded = read_quantization(files.config), is_mxfp4(files.config)
    if (
        packed
        and quantization is None
        and not is_coded
        and (files.weights is None or files.tensor_index is None)
    ):
        raise ConfigError(
            f"quantization gguf keeps the packed weights of a GGUF, but {files.location} is not"
            " read from one: leave it out, or use int8 or int4, which round any model"
        )
    head = _stored_head(files)
    untied = {"tie_word_embeddings": False} if head is StoredHead.OWN else {}
    model = build_model(files.config | untied, dtype, device, rank.count)
    if files.weights is None:
        fill_at_random(model)
    else:
        if is_coded and not packed:
            logging.warning(
                "the experts' MXFP4 weights become %s, about %d times their size in the file",
                str(dtype).removeprefix("torch."),
                round(dtype.itemsize * 8 / MXFP4_BITS),
            )
        stored = read_stored(files, device, packed)
        if head is StoredHead.ONLY:
            stored = head_as_embedding(stored, read_architecture(files.config))
        fill(model, stored, files.location, rank, packed)
    is_kept = any(layer.blocks or layer.coded for layer in model.matrices())
    if packed and quantization is None and not is_kept:
        raise ConfigError(
            f"quantization gguf keeps a GGUF's packed weights, but no matrix of {files.location} is"
            " quantized: leave it out, or use int8 or int4, which round any model"
        )
    take_weights(model)
    model.finish_loading(files.context_length)
    return model.eval()


def read_stored(
    files: ModelFiles,
    device: torch.device,
    packed: bool = False,
    is_wanted: IsWanted = every_tensor,
) -> StoredTensors:
    """Yield the tensors of a model's checkpoint, named as a Hugging Face checkpoint has them.

    Args:
        files: the model's files, which have weights.
        device: where tensors are read to that are not quantized.
        packed: quantized matrices of a GGUF, and experts in MXFP4, stay as they are stored; those
            of a quantized checkpoint do in any case.
        is_wanted: returns whether a tensor of a name is read.

    Raises:
        ModelError: a file cannot be read.
    """
    assert files.weights is not None
    quantization = read_quantization(files.config)
    if quantization is not None:
        stored = safetensors_files(files.weights)
        return from_quantized(stored, quantization, files.location, is_wanted)
    if files.tensor_index is not None:
        return from_gguf(files.weights, files.tensor_index, files.config, packed, is_wanted)
    tensors = from_safetensors(files.weights, device, is_wanted)
    return with_mxfp4(tensors, packed) if is_mxfp4(files.config) else tensors


def _stored_head(files: ModelFiles) -> StoredHead:
    """Return what the checkpoint has for the head; OWN is logged where config.json ties it."""
    config = read_architecture(files.config)
    if files.weights is None or files.tensor_index is not None or not config.tie_word_embeddings:
        return StoredHead.TIED
    head = find_stored_head(files.weights, config)
    if head is StoredHead.OWN:
        logging.warning(
            "config.json has tie_word_embeddings, but %s.weight is stored with other values than"
            " the embedding: the stored head is used",
            config.name("head"),
        )
    return head


def fill(
    model: Model,
    source: StoredTensors,
    location: str,
    rank: TPRank = WHOLE,
    packed_codes: bool = False,
) -> None:
    """Copy each tensor, or this rank's part of it, into its parameter, or keep it packed.

    Codes of a quantized checkpoint are only kept with `packed_codes`, else they are dequantized.

    Raises:
        ModelError: tensors are missing, unexpected or of another shape.
    """
    targets = model.checkpoint_tensors()
    sharder = WeightSharder(model, rank)
    filled: set[str] = set()
    unexpected = []
    quantized: list[tuple[Tensor, QuantizedRows]] = []
    for stored_name, stored in source:
        for name, tensor in model.checkpoint_parts(stored_name, stored):
            if name not in targets:
                unexpected.append(stored_name)
                continue
            target = targets[name]
            if isinstance(tensor, CodedRows) and not packed_codes:
                tensor = tensor.dense()
            if isinstance(tensor, Tensor):
                tensor = sharder.shard(tensor, target)
            _check_shape(tensor, target, stored_name, location)
            if isinstance(tensor, Tensor):
                target.copy_(tensor)
            else:
                quantized.append((target, tensor))
            filled.add(name)
    missing = [name for name in targets if name not in filled]
    for what, names in (("lacks", missing), ("has unexpected", unexpected)):
        if names:
            raise ModelError(f"{location} {what} {len(names)} tensors: {shown_names(names)}")
    keep_quantized(model.matrices(), quantized)


def _check_shape(
    tensor: Tensor | PackedRows | CodedRows, target: Tensor, name: str, location: str
) -> None:
    if tuple(tensor.shape) != tuple(target.shape):
        raise ModelError(
            f"{location}: tensor {name} is {list(tensor.shape)}, but config.json asks for"
            f" {list(target.shape)}"
        )


def shown_names(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
