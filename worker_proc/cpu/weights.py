"""Pack weights into the panels that the kernels multiply."""

import ctypes
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ModelError
from worker_proc.cpu.memory import allocate
from worker_proc.cpu.program import LANES, Format, Matrix
from worker_proc.cpu.quantization import GROUP_SIZE, quantize
from worker_proc.cpu.quantized_panels import (
    format_of,
    join_alike,
    pack_mixed,
    pack_rows,
    to_quantized_panels,
)
from worker_proc.models.layers import Embedding, Linear

UNIT_BYTES = 4


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


class PackedWeights:
    """Packed weights by layer, and every tensor that the kernels point to.

    Packing a layer frees the layer's own weight.
    """

    def __init__(self, bits: int | None = None) -> None:
        """Keep weights as they are, or quantize them.

        Args:
            bits: 8 or 4, to quantize dense weights; None: weights stay dense, or packed as in a
                GGUF.
        """
        self._bits = bits
        self._matrices: dict[nn.Module, Matrix] = {}
        self._kept: list[Tensor] = []
        self._arrays: list[ctypes.Array[Matrix]] = []

    def matrix(self, layer: Linear | Embedding, gated: bool = False, exact: bool = False) -> Matrix:
        """Return the packed weight of a layer.

        Args:
            layer: The layer.
            gated: Its outputs are gate and up.
            exact: Its weight is not rounded to fewer bits.
        """
        if layer not in self._matrices:
            self._matrices[layer] = self._pack(layer, gated, exact)
            del layer.weight
            layer.blocks = ()
        return self._matrices[layer]

    def matrices(self, layers: Iterable[nn.Module], gated: bool = False) -> "ctypes.Array[Matrix]":
        """Return the packed weights of layers, either all dense or all quantized."""
        found = []
        for layer in layers:
            assert isinstance(layer, Linear)
            found.append(self.matrix(layer, gated))
        if len({matrix.format == Format.DENSE for matrix in found}) != 1:
            raise ModelError(
                "some experts of a layer are quantized and others are not; start with"
                " --attention-backend torch"
            )
        array = (Matrix * len(found))(*found)
        self._arrays.append(array)
        return array

    def keep_floats(self, values: Tensor) -> int:
        """Keep a float32 copy of a tensor and return its address."""
        return self._keep(values.detach().float().contiguous())

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _pack(self, layer: Linear | Embedding, gated: bool, exact: bool) -> Matrix:
        if layer.blocks:
            return self._pack_blocks(layer, gated)
        weight = interleave(layer.weight) if gated else layer.weight
        if self._bits is None or exact:
            panels = to_panels(weight)
            return self._uniform(layer, gated, Format.DENSE, panels, len(weight), panels.shape[1])
        rows = quantize(weight, self._bits, layer.importance)
        panels = to_quantized_panels(rows)
        depth = rows.codes.shape[1]
        return self._uniform(layer, gated, format_of(rows.kind), panels, len(weight), depth)

    def _pack_blocks(self, layer: Linear | Embedding, gated: bool) -> Matrix:
        """Pack the blocks of a GGUF as they are, each part in its type."""
        parts = join_alike(layer.blocks)
        depth = parts[0].shape[1] // GROUP_SIZE
        if len(parts) > 1:
            return self._mixed(layer, gated, *pack_mixed(parts, gated), depth)
        rows = parts[0]
        if gated:
            rows = replace(rows, data=interleave(rows.data))
        panels = pack_rows(rows)
        return self._uniform(layer, gated, format_of(rows.kind), panels, len(rows.data), depth)

    def _uniform(
        self,
        layer: Linear | Embedding,
        gated: bool,
        panel_format: Format,
        panels: Tensor,
        columns: int,
        depth: int,
    ) -> Matrix:
        return Matrix(
            format=panel_format,
            panels=self._keep(panels),
            panel_units=panels.stride(0),
            bias=self._bias(layer, gated, len(panels) * LANES),
            columns=columns,
            panel_count=len(panels),
            depth=depth,
        )

    def _mixed(
        self,
        layer: Linear | Embedding,
        gated: bool,
        formats: list[Format],
        panels: list[Tensor],
        depth: int,
    ) -> Matrix:
        # The fields of a Panel in program.h; the panels share the memory of the first one.
        rows = zip(formats, map(self._keep, panels), map(len, panels), strict=True)
        table = torch.tensor(list(rows), dtype=torch.int64)
        columns = len(panels) * LANES if gated else sum(len(part.data) for part in layer.blocks)
        return Matrix(
            format=Format.MIXED,
            mixed=self._keep(table),
            bias=self._bias(layer, gated, len(panels) * LANES),
            columns=columns,
            panel_count=len(panels),
            depth=depth,
        )

    def _bias(self, layer: Linear | Embedding, gated: bool, length: int) -> int | None:
        """Return the address of a layer's bias, padded with zeros."""
        bias = layer.bias if isinstance(layer, Linear) else None
        if bias is None:
            return None
        bias = interleave(bias) if gated else bias
        return self.keep_floats(F.pad(bias.float(), (0, length - len(bias))))


def to_panels(weight: Tensor) -> Tensor:
    """Pack [outputs, inputs] into zero-padded panels [panels, depth, 16] int32.

    A panel has 16 outputs side by side, and for each depth the 4 bytes of one float32 input or of
    two bfloat16 inputs.
    """
    inputs_per_unit = UNIT_BYTES // weight.dtype.itemsize
    outputs, inputs = weight.shape
    weight = _padded(weight, (0, -inputs % inputs_per_unit, 0, -outputs % LANES)).contiguous()
    units = weight.view(torch.int32).view(-1, LANES, weight.shape[1] // inputs_per_unit)
    panels = allocate(units.numel() * UNIT_BYTES).view(torch.int32)
    panels = panels.view(units.shape[0], units.shape[2], LANES)
    return panels.copy_(units.transpose(1, 2))


def interleave(weight: Tensor) -> Tensor:
    """Reorder gate and up [2 * size, ...] so that 16 rows of each alternate.

    Gate and up are padded with zeros to a multiple of 16 rows.
    """
    size = len(weight) // 2
    padding = (*[0, 0] * (weight.dim() - 1), 0, -size % LANES)
    gate, up = (_padded(part, padding) for part in weight.split(size))
    pairs = torch.stack((gate.unflatten(0, (-1, LANES)), up.unflatten(0, (-1, LANES))), 1)
    return pairs.flatten(0, 2)


def _padded(weight: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Return a tensor with zeros at its ends, which `F.pad` copies even where there are none."""
    return F.pad(weight, padding) if any(padding) else weight
