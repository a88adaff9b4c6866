"""Let layers keep the codes of a quantized checkpoint, if all of their parts have one format."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from worker_proc.loading.quantized.coded_rows import CodedRows
from worker_proc.loading.sharding import memory_of
from worker_proc.models.layers import Embedding, Linear

GROUP_MULTIPLE = 32  # inputs that the kernels multiply together


def keep_coded(
    layers: Iterable[Linear | Embedding], coded: Sequence[tuple[Tensor, CodedRows]]
) -> None:
    """Set the `coded` of each layer whose rows are all coded alike; dequantize all other rows.

    Args:
        layers: The layers that can keep codes.
        coded: The rows of a parameter, as [outputs, inputs], and their codes.
    """
    parts_by_memory = defaultdict(list)
    for target, part in coded:
        parts_by_memory[memory_of(target)].append((target, part))
    kept_bytes = kept = 0
    for layer in layers:
        parts = sorted(
            parts_by_memory.get(memory_of(layer.weight), ()),
            key=lambda part: part[0].storage_offset(),
        )
        rows = tuple(part for _, part in parts)
        is_whole = sum(len(target) for target, _ in parts) == len(layer.weight)
        if parts and is_whole and _alike(rows):
            layer.coded = rows
            kept, kept_bytes = (
                kept + len(rows),
                kept_bytes + sum(part.stored_bytes for part in rows),
            )
            del parts_by_memory[memory_of(layer.weight)]
    dense = [part for parts in parts_by_memory.values() for part in parts]
    for target, part in dense:
        target.copy_(part.dense())
    if kept:
        logging.info(
            "%d quantized matrices stay as the checkpoint has them: %.1f MB", kept, kept_bytes / 1e6
        )
    if dense:
        logging.warning(
            "%d quantized matrices are dequantized, %.1f MB instead of %.1f MB: groups of %d"
            " inputs, or fused with matrices of another format",
            len(dense),
            sum(target.numel() * target.element_size() for target, _ in dense) / 1e6,
            sum(part.stored_bytes for _, part in dense) / 1e6,
            dense[0][1].group_size,
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
