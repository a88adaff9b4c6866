"""Packed weights in a file, so that the next worker of the same model reads and does not pack them.

The file has the matrices in the order in which the engine packs them: an index as JSON, then the
tensors of each matrix. It belongs to one run of one server, whose directory it is in.
"""

import logging
import shutil
import threading
from collections.abc import Sequence
from io import BufferedReader, BufferedWriter
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.cpu.memory import allocate
from worker_proc.cpu.program import Format, Matrix

ALIGNMENT_BYTES = 64
# Fields of a Matrix that are the address of a tensor, and those that are numbers.
ADDRESSES = ("panels", "mixed", "bias", "order")
NUMBERS = ("format", "panel_units", "columns", "panel_count", "depth", "inputs")
# The length of the index, at the begin of the file.
LENGTH_BYTES = 8
# Room that a file must leave on its disk, as a multiple of its size.
SPARE_SHARE = 1.0


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor. offset: from the begin of its matrix, in bytes."""

    dtype: str
    shape: list[int]
    offset: int
    num_bytes: int


class StoredMatrix(msgspec.Struct, frozen=True):
    """A matrix.

    Attributes:
        name: says which layer it is of, in the order of packing.
        numbers: values of NUMBERS.
        tensors: every tensor that it points to.
        addresses: by field of ADDRESSES, the number of its tensor.
        panels: of a matrix of several formats, format and tensor of each panel; its table of
            addresses is made of them.
        num_bytes: of all tensors, with padding.
    """

    name: str
    numbers: dict[str, int]
    tensors: list[StoredTensor]
    addresses: dict[str, int]
    panels: list[tuple[int, int]]
    num_bytes: int


class Index(msgspec.Struct, frozen=True):
    """The index of a file. key: of the weights and of how they are packed."""

    key: str
    matrices: list[StoredMatrix]


class PackStore:
    """Gives the matrices of the file in order, or takes them while they are packed.

    Args:
        path: the file, which may not be there.
        key: of the weights and of how they are packed; a file with another key is not read.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key
        self._packed: list[tuple[str, Matrix, list[Tensor]]] = []
        self._file: BufferedReader | None = None
        self._stored: list[StoredMatrix] = []
        self._open()

    def _open(self) -> None:
        try:
            file = self._path.open("rb")
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            index = msgspec.json.decode(file.read(length), type=Index)
        except (OSError, msgspec.MsgspecError):  # not there, or cut
            return
        if index.key == self._key:
            self._file, self._stored = file, index.matrices[::-1]
        else:
            file.close()

    @property
    def is_full(self) -> bool:
        """Whether the matrices are read."""
        return self._file is not None

    def next(self, name: str) -> tuple[Matrix, list[Tensor]] | None:
        """Return the next matrix and its tensors; None: it has to be packed.

        Args:
            name: says which layer it is of.

        Raises:
            ModelError: the file is cut, or has another model; it is removed.
        """
        if self._file is None:
            return None
        found = None
        if self._stored and self._stored[-1].name == name:
            found = _read(self._file, self._stored.pop())
        if found is None:
            self._path.unlink(missing_ok=True)
            raise ModelError(
                f"{self._path} does not have the packed weights of this model: it was removed, and"
                " the next start packs them again"
            )
        return found

    def take(self, name: str, matrix: Matrix, tensors: Sequence[Tensor]) -> None:
        """Take a matrix that was packed, with every tensor that it points to."""
        self._packed.append((name, matrix, list(tensors)))

    def close(self) -> None:
        """End the reading, or write what was packed, in a thread."""
        if self._file is not None:
            self._file.close()
            self._file = None
        elif self._packed:
            threading.Thread(target=self._write, name="pack-store", daemon=True).start()

    def _write(self) -> None:
        """Write the file. Without room for it there is none."""
        packed, self._packed = self._packed, []
        matrices = [_describe(*one) for one in packed]
        num_bytes = sum(matrix.num_bytes for matrix in matrices)
        unfinished = self._path.with_suffix(".tmp")
        try:
            free = shutil.disk_usage(self._path.parent).free
            if free < num_bytes * (1 + SPARE_SHARE):
                return
            with unfinished.open("wb") as file:
                index = msgspec.json.encode(Index(self._key, matrices))
                file.write(len(index).to_bytes(LENGTH_BYTES, "little") + index)
                for stored, (_, _, tensors) in zip(matrices, packed, strict=True):
                    _write_tensors(file, stored, tensors)
            unfinished.replace(self._path)
        except OSError as error:
            logging.info("the packed weights are not kept for the next load: %s", error)
            unfinished.unlink(missing_ok=True)


def _describe(name: str, matrix: Matrix, tensors: list[Tensor]) -> StoredMatrix:
    places = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
    addresses = {
        field: places[address]
        for field in ADDRESSES
        if field != "mixed" and (address := getattr(matrix, field))
    }
    panels = []
    if matrix.format == Format.MIXED:
        table = tensors[places[matrix.mixed]]
        panels = [(int(kind), places[int(address)]) for kind, address, _ in table.tolist()]
    offset, stored = 0, []
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored.append(StoredTensor(dtype, list(tensor.shape), offset, num_bytes))
        offset += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    numbers = {field: getattr(matrix, field) for field in NUMBERS}
    return StoredMatrix(name, numbers, stored, addresses, panels, offset)


def _write_tensors(file: BufferedWriter, stored: StoredMatrix, tensors: list[Tensor]) -> None:
    begin = file.tell()
    for place, tensor in zip(stored.tensors, tensors, strict=True):
        file.seek(begin + place.offset)
        file.write(_bytes_of(tensor.contiguous()))
    file.truncate(begin + stored.num_bytes)
    file.seek(begin + stored.num_bytes)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _read(file: BufferedReader, stored: StoredMatrix) -> tuple[Matrix, list[Tensor]] | None:
    """Return a matrix and its tensors; None where the file is cut."""
    memory = allocate(stored.num_bytes)
    if file.readinto(_bytes_of(memory)) != stored.num_bytes:
        return None
    tensors = [
        memory[one.offset : one.offset + one.num_bytes]
        .view(getattr(torch, one.dtype))
        .view(one.shape)
        for one in stored.tensors
    ]
    addresses = {field: tensors[n].data_ptr() for field, n in stored.addresses.items()}
    if stored.panels:
        rows = [(kind, tensors[n].data_ptr(), len(tensors[n])) for kind, n in stored.panels]
        table = torch.tensor(rows, dtype=torch.int64)
        tensors.append(table)
        addresses["mixed"] = table.data_ptr()
    return Matrix(**stored.numbers, **addresses), tensors
