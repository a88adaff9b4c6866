"""Cut the tensors of a checkpoint into those that a decoder has."""

import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

from quadriga.model_files.config.decoder_config import DecoderConfig
from worker_proc.loading.gguf_blocks import PackedRows
from worker_proc.loading.quantized.coded_rows import CodedRows
from worker_proc.models.expert_parts import expert_parts

StoredTensor = Tensor | PackedRows | CodedRows
Stored = TypeVar("Stored", Tensor, PackedRows, CodedRows)


def checkpoint_parts(
    config: DecoderConfig, name: str, tensor: StoredTensor
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the parts of a stored tensor, whole over the ranks, by their names in `names`.

    Args:
        config: The model, whose `names` has "qkv" and "gate_up" if the checkpoint fuses them.
        name: The stored name.
        tensor: The stored tensor.
    """
    if name.startswith(config.skipped_starts):
        return
    name = plain_name(config, name)
    if name.endswith(config.skipped) or (
        config.tie_word_embeddings and name == f"{config.name('head')}.weight"
    ):
        return
    if (experts := expert_parts(config, name, tensor)) is not None:
        yield from experts
        return
    if config.transposed and name.startswith(f"{config.name('layers')}."):
        tensor = tensor.t() if isinstance(tensor, Tensor) and tensor.dim() == 2 else tensor
    for key, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        fused = config.names.get(key)
        if fused is not None and f".{fused}." in name:
            rows = _rows_of_qkv(config, tensor) if key == "qkv" else _halves(tensor)
            for part, index in zip(parts, rows, strict=True):
                stored = take_rows(tensor, index)
                yield name.replace(f".{fused}.", f".{config.name(part)}."), stored
            return
    if config.interleaved_rope and any(f".{config.name(key)}." in name for key in ("q", "k")):
        tensor = take_rows(tensor, half_rotary_rows(config, tensor.shape[0] // config.head_dim))
    yield name, tensor


def plain_name(config: DecoderConfig, name: str) -> str:
    """Return the name of a stored tensor without the parts that `config` removes."""
    for part in config.removed:
        name = name.replace(part, "")
    return name


def take_rows(tensor: StoredTensor, rows: Tensor) -> StoredTensor:
    """Return the rows of these numbers."""
    if isinstance(tensor, PackedRows):
        return dataclasses.replace(tensor, data=tensor.data[rows.to(tensor.data.device)])
    if isinstance(tensor, CodedRows):
        return tensor.take(rows)
    return tensor[rows.to(tensor.device)]


def half_rotary_rows(config: DecoderConfig, heads: int) -> Tensor:
    """Return the rows of queries or keys so that rotated pairs are half the rotated channels apart.

    The stored rows have the channels of a pair side by side.
    """
    scaling = next(rope for rope in config.ropes if rope is not None)
    # Of an odd number, the channel after the last one is rotated as well.
    dim, rotated = config.head_dim, scaling.head_dim + scaling.head_dim % 2
    head = torch.cat((torch.arange(rotated).view(-1, 2).t().flatten(), torch.arange(rotated, dim)))
    return (torch.arange(heads).unsqueeze(1) * dim + head).flatten()


def _rows_of_qkv(config: DecoderConfig, tensor: StoredTensor) -> tuple[Tensor, ...]:
    """Return the rows of queries, keys and values in a fused tensor."""
    rows = torch.arange(tensor.shape[0])
    if config.qkv_by_head:
        heads = rows.view(-1, 3, config.head_dim).transpose(0, 1).flatten(1)
        return heads[0], heads[1], heads[2]
    group = config.num_heads // config.num_kv_heads
    size = len(rows) // (group + 2)
    return rows[: group * size], rows[group * size : -size], rows[-size:]


def _halves(tensor: StoredTensor) -> tuple[Tensor, ...]:
    return torch.arange(tensor.shape[0]).chunk(2)
