"""The form into which the layers of all quantized checkpoints are read: codes and scales."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.errors import ModelError
from quadriga.model_files.quantized.scheme import WHOLE_ROW


class CodeKind(enum.Enum):
    """What a code stands for.

    INT4, INT8: The integer code - zero. FLOAT8: A float8_e4m3fn. TABLE4: An entry of a table.
    """

    INT4 = enum.auto()
    INT8 = enum.auto()
    FLOAT8 = enum.auto()
    TABLE4 = enum.auto()


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A quantized matrix, with the values number(code) * scale.

    Attributes:
        kind: What a code stands for.
        shape: Outputs and inputs.
        group_size: Neighbouring columns of a row that share a scale.
        unpack: Returns the codes [outputs, inputs] uint8; until then they stay packed.
        scale: [outputs, groups] in float16, bfloat16 or float32.
        zero: [outputs, groups] uint8, for integers; else None.
        table: [16] float32, for TABLE4; else None.
        order: [inputs] int64, the input that each column is multiplied by; None: in order.
        stored_bytes: Bytes of the tensors in the file.
    """

    kind: CodeKind
    shape: tuple[int, int]
    group_size: int
    unpack: Callable[[], Tensor]
    scale: Tensor
    zero: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    stored_bytes: int = 0

    def take(self, rows: Tensor) -> "CodedRows":
        """Return the rows of these numbers."""
        part = len(rows) / self.shape[0]
        return dataclasses.replace(
            self,
            shape=(len(rows), self.shape[1]),
            unpack=lambda: self.unpack()[rows],
            scale=self.scale[rows],
            zero=None if self.zero is None else self.zero[rows],
            stored_bytes=int(self.stored_bytes * part),
        )

    def dense(self) -> Tensor:
        """Return the values [outputs, inputs] in float32, in the order of the inputs."""
        values = self._numbers().mul_(self._spread(self.scale.float()))
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def _numbers(self) -> Tensor:
        """Return what the codes stand for, [outputs, inputs] float32."""
        codes = self.unpack()
        if self.kind is CodeKind.FLOAT8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.table is not None:
            return self.table[codes.int()]
        assert self.zero is not None
        return codes.float().sub_(self._spread(self.zero.float()))

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat [outputs, groups] to [outputs, inputs]."""
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]


class LayerTensors:
    """The tensors of a quantized layer, by the last part of their names."""

    def __init__(self, layer: str, location: str, tensors: Mapping[str, Tensor]) -> None:
        self.layer = layer
        self._location = location
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise self.error(f"lacks the tensor {self.layer}.{name}; fetch the checkpoint again")
        return self._tensors[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return tuple(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    def error(self, text: str) -> ModelError:
        """Return an error that begins with the location of the checkpoint."""
        return ModelError(f"{self._location} {text}")

    def unsupported(self, name: str, value: object, supported: str) -> ModelError:
        """Return an error for a tensor that has an unsupported property."""
        return self.error(
            f"has the tensor {self.layer}.{name} with {value}; supported: {supported}; take another"
            " checkpoint of the model"
        )


def group_size_of(inputs: int, group_size: int) -> int:
    """Return the columns that share a scale; WHOLE_ROW stands for all."""
    return inputs if group_size == WHOLE_ROW else group_size


def order_of(groups: Tensor, group_size: int, tensors: LayerTensors) -> Tensor | None:
    """Return the order in which the inputs of each group are neighbours; None: they are already.

    Args:
        groups: [inputs] the group of each input.
        group_size: Inputs of a group.
        tensors: The layer, for an error.
    """
    expected = torch.arange(len(groups)) // group_size
    if torch.equal(groups.long(), expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order].long(), expected):
        raise tensors.unsupported("g_idx", "groups of unequal sizes", f"groups of {group_size}")
    return order


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Unpack 8 codes of 4 bits from each int32, the lowest first: [rows, words] to uint8."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)


def unpack_words(packed: Tensor, bits: int) -> Tensor:
    """Unpack codes of 4 or 8 bits from int32, the lowest first: [rows, words] to uint8."""
    return unpack_nibbles(packed) if bits == 4 else packed.contiguous().view(torch.uint8)
