"""Adapters (LoRA) in the memory of a GPU, in the form that kernels/adapters.py takes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quadriga.errors import ModelError
from quadriga.wire.worker import NO_ADAPTER
from worker_proc.adapters.change import Adapter, AdapterLimits, LinearChange, no_room_for_adapter
from worker_proc.gpu.kernels import adapters as kernels
from worker_proc.gpu.kernels.adapters import (
    BLOCK_FIELDS,
    BLOCK_ROWS,
    MAX_SPLIT_ROWS,
    TILE_OUTPUTS,
    RowGroups,
    StepAdapters,
)
from worker_proc.models.attention import Ints
from worker_proc.models.decoder import Decoder
from worker_proc.models.layers import Experts, gate_up_rows
from worker_proc.models.transfer import send, send_all

ALIGNMENT = 16  # elements; of what begins in an adapter's memory, and of the columns of U
DOWN, UP, SPANS, GAIN, SHIFT, EMBEDDING, RANKS, WIDTH = (
    field.value
    for field in (
        kernels.DOWN, kernels.UP, kernels.SPANS, kernels.GAIN, kernels.SHIFT, kernels.EMBEDDING,
        kernels.RANKS, kernels.WIDTH,
    )
)  # fmt: skip


class Address(NamedTuple):
    """A field that has an address.

    Attributes:
        matrix, field: as in kernels/adapters.py.
        offset: of what it leads to, in bytes of the adapter's memory.
    """

    matrix: int
    field: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HostAdapter(Adapter):
    """An adapter in host memory, as it is copied to the device.

    `changes` and `embedding` are empty: `memory` has the numbers.

    Attributes:
        fields: `[matrices, fields]` int64, without the addresses.
        addresses: the fields that lack them.
        memory: `[bytes]`.
    """

    fields: Ints
    addresses: tuple[Address, ...]
    memory: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes, in host memory and on the device."""
        return len(self.memory)

    def upload(self, device: torch.device) -> "DeviceAdapter":
        """Return a copy on the device. Raise ModelError if there is no memory for it."""
        try:
            memory = _to_device(self.memory, device)
        except torch.OutOfMemoryError as error:
            raise no_room_for_adapter(self.num_bytes, device) from error
        fields = self.fields.copy()
        for matrix, field, offset in self.addresses:
            fields[matrix, field] = memory.data_ptr() + offset
        return DeviceAdapter({}, fields=fields, memory=memory)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DeviceAdapter(Adapter):
    """An adapter on the device. `changes` and `embedding` are empty: `fields` has the addresses.

    Attributes:
        fields: `[matrices, fields]` int64 on the host, see kernels/adapters.py.
        memory: what the addresses point to.
    """

    fields: Ints
    memory: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return len(self.memory)


class GPUAdapters:
    """The adapters of a model.

    Args:
        model: the model, or the part of it that this rank has.
        limits: of the adapters.
        dtype: of the products.
        device: the GPU.
    """

    def __init__(
        self, model: Decoder, limits: AdapterLimits, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.limits, self._dtype, self._device = limits, dtype, device
        self._matrices, self._embedding = model.matrices(), model.embedding
        self._numbers: dict[nn.Module, int] = {
            matrix: number for number, matrix in enumerate(self._matrices)
        }
        self._experts = [module for module in model.modules() if isinstance(module, Experts)]
        parts = Counter(id(rows.matrix) for rows in model.checkpoint_rows().values())
        self._max_ranks = _round_up(limits.max_rank * max(parts.values()))
        size = limits.max_adapters, len(self._matrices), kernels.NUM_FIELDS.value
        self._table = torch.zeros(size, dtype=torch.int64, device=device)
        self._held: dict[int, DeviceAdapter] = {}

    def pack(self, adapter: Adapter) -> HostAdapter:
        """Return an adapter in host memory, in any thread.

        Raises:
            ModelError: its ranks are too many, or it scales what experts with biases return.
        """
        packer = _Packer(len(self._matrices), self._dtype, self._max_ranks)
        for number, change in self._changes(adapter).items():
            packer.add(number, len(self._matrices[number].weight), change)
        if adapter.embedding is not None:
            number = self._numbers[self._embedding]
            packer.put(number, EMBEDDING, adapter.embedding.to(self._dtype))
        return packer.finish()

    def upload(self, adapter: Adapter) -> DeviceAdapter:
        """Return an adapter on the device, in any thread.

        Raises:
            ModelError: as `pack`, or there is no memory for it.
        """
        if isinstance(adapter, DeviceAdapter):
            return adapter
        packed = adapter if isinstance(adapter, HostAdapter) else self.pack(adapter)
        return packed.upload(self._device)

    def _changes(self, adapter: Adapter) -> dict[int, LinearChange]:
        """Return changes as the products have their outputs and inputs.

        Raises:
            ModelError: it scales what experts with biases return.
        """
        changes = dict(adapter.changes)
        for experts in self._experts:
            of_experts = zip(experts.gate_up, experts.down, experts.inner_orders, strict=True)
            for gate_up, down, order in of_experts:
                first, second = self._numbers[gate_up], self._numbers[down]
                for number in changes.keys() & {first, second}:
                    if changes[number].gain is not None and gate_up.bias is not None:
                        raise ModelError(
                            "the adapter scales the results of experts that have biases (DoRA),"
                            " which the kernels of a GPU do not do: start with --attention-backend"
                            " torch"
                        )
                if order is not None and first in changes:
                    changes[first] = changes[first].with_outputs(gate_up_rows(order))
                if order is not None and second in changes:
                    changes[second] = changes[second].with_inputs(order)
        return changes

    def set_adapter(self, index: int, adapter: Adapter | None) -> None:
        """Let an index have an adapter from the next step on, or none."""
        held = None if adapter is None else self.upload(adapter)
        if held is None:
            self._table[index].zero_()
            self._held.pop(index, None)
        else:
            self._table[index].copy_(send(held.fields, self._device))
            self._held[index] = held

    def of_rows(self, adapters: Ints) -> StepAdapters:
        """Return the rows that have adapters.

        Args:
            adapters: `[rows]` the index of each row's adapter.

        Raises:
            ValueError: an index has no adapter.
        """
        self.check(adapters)
        return self.of_groups(self._send(adapters, None))

    def of_groups(self, groups: RowGroups, is_split: bool | None = None) -> StepAdapters:
        """Return rows that are on the device already.

        Args:
            groups: the rows.
            is_split: see `kernels.adapters.adapt`; None: as is best for so many.
        """
        if is_split is None:
            is_split = len(groups.order) <= MAX_SPLIT_ROWS
        return StepAdapters(self._table, self._numbers, self._max_ranks, groups, is_split)

    def check(self, adapters: Ints) -> None:
        """Raise ValueError if an index has no adapter."""
        missing = set(adapters.tolist()) - self._held.keys() - {NO_ADAPTER}
        if missing:
            raise ValueError(f"a row has the adapter {min(missing)}, which is not loaded")

    def padding(self) -> Iterator[StepAdapters]:
        """Yield steps of one row without an adapter, which launch every kernel there is."""
        groups = self._send(np.array([NO_ADAPTER]), 1)
        for is_split in (True, False):
            yield self.of_groups(groups, is_split)

    def _send(self, adapters: Ints, num_blocks: int | None) -> RowGroups:
        """Group rows, see `group_rows`."""
        return RowGroups(*send_all(self._device, *group_rows(adapters, num_blocks), adapters))


def num_blocks_of(rows: int, max_adapters: int) -> int:
    """Return into how many blocks rows may be cut, whatever adapters they have."""
    return min(rows, rows // BLOCK_ROWS + max_adapters)


def group_rows(adapters: Ints, num_blocks: int | None = None) -> tuple[Ints, Ints]:
    """Sort rows by their adapters.

    Args:
        adapters: `[rows]` the index of each row's adapter, or NO_ADAPTER.
        num_blocks: to which the blocks are padded; None: they are not.

    Returns:
        Order and blocks of RowGroups on the host. Rows without adapters come last in the order, and
        are in no block.
    """
    # As unsigned numbers NO_ADAPTER is the largest.
    order = np.argsort(adapters.astype(np.uint64), kind="stable")
    found: list[tuple[int, ...]] = []
    begin = 0
    indexes, counts = np.unique(adapters[adapters != NO_ADAPTER], return_counts=True)
    for index, count in zip(indexes.tolist(), counts.tolist(), strict=True):
        for first in range(begin, begin + count, BLOCK_ROWS):
            found.append((index, 0, first, min(BLOCK_ROWS, begin + count - first)))
        begin += count
    padding = 0 if num_blocks is None else num_blocks - len(found)
    found += [(-1, 0, 0, 0)] * padding
    blocks = np.array(found, dtype=np.int64).reshape(-1, BLOCK_FIELDS.value)
    return order, blocks


class _Packer:
    """Collects the tensors of an adapter, which are then copied to one piece of memory."""

    def __init__(self, num_matrices: int, dtype: torch.dtype, max_ranks: int) -> None:
        self._fields = np.zeros((num_matrices, kernels.NUM_FIELDS.value), dtype=np.int64)
        self._dtype, self._max_ranks = dtype, max_ranks
        self._tensors: list[tuple[int, int, Tensor]] = []
        self.num_bytes = 0

    def put(self, number: int, field: int, tensor: Tensor) -> None:
        """Add a tensor whose address a field of a matrix gets."""
        self._tensors.append((number, field, tensor.contiguous()))
        self.num_bytes += _round_up(tensor.nbytes)

    def add(self, number: int, outputs: int, change: LinearChange) -> None:
        """Add the change of a matrix."""
        if change.down is not None:
            ranks = len(change.down)
            if ranks > self._max_ranks:
                raise ModelError(
                    f"the adapter changes a matrix by ranks of {ranks} in all, of at most"
                    f" {self._max_ranks}: start with a larger --max-lora-rank"
                )
            self.put(number, DOWN, change.down.to(self._dtype))
            self._fields[number, RANKS] = ranks
        if change.parts:
            self._add_up(number, outputs, change)
        for field, values in ((GAIN, change.gain), (SHIFT, change.shift)):
            if values is not None:
                self.put(number, field, values.float())

    def _add_up(self, number: int, outputs: int, change: LinearChange) -> None:
        """Add U by tiles of outputs, each with the range of t that it is multiplied by.

        A tile that nothing changes takes no memory.
        """
        num_tiles = -(-outputs // TILE_OUTPUTS)
        firsts, ends = np.full(num_tiles, np.iinfo(np.int64).max), np.zeros(num_tiles, np.int64)
        for part in change.parts:
            tiles = slice(part.rows.start // TILE_OUTPUTS, -(-part.rows.stop // TILE_OUTPUTS))
            firsts[tiles] = np.minimum(firsts[tiles], part.ranks.start)
            ends[tiles] = np.maximum(ends[tiles], part.ranks.stop)
        is_changed = ends > 0
        firsts[~is_changed] = 0
        counts = ends - firsts
        places: Ints = np.cumsum(is_changed) - is_changed
        width = _round_up(int(counts.max()))
        up = torch.zeros(int(is_changed.sum()) * TILE_OUTPUTS, width, dtype=self._dtype)
        for part in change.parts:
            rows = np.arange(part.rows.start, part.rows.stop)
            tiles_of = rows // TILE_OUTPUTS
            to = torch.from_numpy(places[tiles_of] * TILE_OUTPUTS + rows % TILE_OUTPUTS)
            columns = part.ranks.start - firsts[tiles_of]
            for column in np.unique(columns).tolist():
                chosen = torch.from_numpy(columns == column)
                up[to[chosen], column : column + part.up.shape[1]] = part.up[chosen].to(self._dtype)
        self.put(number, UP, up)
        self.put(number, SPANS, torch.from_numpy(np.stack((firsts, counts, places), 1)))
        self._fields[number, WIDTH] = width

    def finish(self) -> HostAdapter:
        """Copy all tensors, and return the adapter."""
        memory, begin = torch.zeros(self.num_bytes, dtype=torch.uint8), 0
        addresses = []
        for number, field, tensor in self._tensors:
            place = memory[begin : begin + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            addresses.append(Address(number, field, begin))
            begin += _round_up(tensor.nbytes)
        return HostAdapter({}, fields=self._fields, addresses=tuple(addresses), memory=memory)


def _round_up(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _to_device(on_host: Tensor, device: torch.device) -> Tensor:
    return on_host.to(device)
