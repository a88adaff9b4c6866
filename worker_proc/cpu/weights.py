"""Pack weights into the panels that the kernels multiply."""

import ctypes
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ModelError
from worker_proc.cpu.memory import allocate
from worker_proc.cpu.program import Format, Matrix
from worker_proc.cpu.quantization import quantize, quantized_as_in_gguf
from worker_proc.loading.gguf_blocks import Blocks
from worker_proc.models.layers import Embedding, Linear

LANES = 16  # outputs of a panel
UNIT_BYTES = 4


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


class PackedWeights:
    """Packed weights by layer, and every tensor that the kernels point to.

    Packing a layer frees the layer's own weight.
    """

    def __init__(self, bits: int | None = None) -> None:
        """Keep weights as they are, or quantise them.

        Args:
            bits: 8 or 4, to quantise dense weights; None: weights stay dense, or packed as in a
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
        """Return the packed weights of layers, either all dense or all quantised."""
        found = []
        for layer in layers:
            assert isinstance(layer, Linear)
            found.append(self.matrix(layer, gated))
        if len({matrix.format == Format.DENSE for matrix in found}) != 1:
            raise ModelError(
                "some experts of a layer are quantised and others are not; start with"
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
        rows = self._quantized(layer, exact)
        if rows is None:
            weight = interleave(layer.weight) if gated else layer.weight
            panels, panel_format, columns = to_panels(weight), Format.DENSE, len(weight)
            depth = panels.shape[1]
        else:
            rows = rows.map_rows(interleave) if gated else rows
            panels, columns, depth = to_quantised_panels(rows), *rows.scale.shape
            panel_format = Format.INT8 if rows.bits == 8 else Format.INT4
        return Matrix(
            format=panel_format,
            panels=self._keep(panels),
            panel_units=panels.stride(0),
            bias=self._bias(layer, gated, panels.shape[0] * LANES),
            columns=columns,
            panel_count=panels.shape[0],
            depth=depth,
        )

    def _quantized(self, layer: Linear | Embedding, exact: bool) -> Blocks | None:
        if layer.blocks:
            return quantized_as_in_gguf(layer.blocks)
        return None if self._bits is None or exact else quantize(layer.weight, self._bits)

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
    padding = (0, -inputs % inputs_per_unit, 0, -outputs % LANES)
    weight = F.pad(weight, padding).contiguous()
    units = weight.view(torch.int32).view(-1, LANES, weight.shape[1] // inputs_per_unit)
    panels = allocate(units.numel() * UNIT_BYTES).view(torch.int32)
    panels = panels.view(units.shape[0], units.shape[2], LANES)
    return panels.copy_(units.transpose(1, 2))


def to_quantised_panels(rows: Blocks) -> Tensor:
    """Pack quantised rows into padded panels [panels, panel_units] int32, see quantised.h."""
    rows = rows.map_rows(_split_in_sixteens)
    units = rows.codes.view(torch.uint8).unflatten(3, (-1, UNIT_BYTES)).permute(0, 2, 3, 1, 4)
    factors = [rows.scale]
    if rows.minimum is None:
        units = units ^ 128  # the kernels read codes of 8 bits as unsigned ones around 128
    else:
        low, high = units.chunk(2, 2)
        units = low | high << 4
        factors.append(rows.minimum)
    parts = [units.flatten(1)]
    parts += [f.transpose(1, 2).flatten(1).half().view(torch.uint8) for f in factors]
    panels = torch.cat(parts, 1)
    return allocate(panels.numel()).view(panels.shape).copy_(panels).view(torch.int32)


def _split_in_sixteens(rows: Tensor) -> Tensor:
    """Pad and reshape [outputs, ...] to [panels, 16, ...]."""
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(rows) % LANES]
    return torch.unflatten(F.pad(rows, padding), 0, (-1, LANES))


def interleave(weight: Tensor) -> Tensor:
    """Reorder gate and up [2 * size, ...] so that 16 rows of each alternate.

    Gate and up are padded with zeros to a multiple of 16 rows.
    """
    size = len(weight) // 2
    padding = [0, 0] * (weight.dim() - 1) + [0, -size % LANES]
    gate, up = (F.pad(part, padding) for part in weight.split(size))
    pairs = torch.stack((gate.unflatten(0, (-1, LANES)), up.unflatten(0, (-1, LANES))), 1)
    return pairs.flatten(0, 2)
