"""Pack the codes of quantized checkpoints into panels, as coded.h multiplies them."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.cpu.memory import allocate
from worker_proc.cpu.program import LANES, Format, Matrix
from worker_proc.cpu.quantization import GROUP_SIZE
from worker_proc.cpu.weights import UNIT_BYTES, PackedWeights, interleave
from worker_proc.loading.quantized.coded_rows import CodedRows, CodeKind
from worker_proc.models.layers import Embedding, Linear

HEADER_INTS = 16
SCALE_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
SHARED_SCALE = 3
FORMATS = {
    CodeKind.INT8: Format.CODED_INT8,
    CodeKind.INT4: Format.CODED_INT4,
    CodeKind.FLOAT8: Format.CODED_FLOAT8,
    CodeKind.TABLE4: Format.CODED_TABLE4,
}
MIDDLES = {CodeKind.INT8: 128, CodeKind.INT4: 8}


class CodedWeights(PackedWeights):
    """Packed weights, some of which have the codes of a quantized checkpoint."""

    def log_bytes(self) -> None:
        """Log the bytes of the matrices by format, if a checkpoint was quantized."""
        sizes: Counter[str] = Counter()
        for matrix in self._matrices.values():
            panel_bytes = matrix.panel_units * UNIT_BYTES
            sizes[Format(matrix.format).name.lower()] += matrix.panel_count * panel_bytes
        if any(name.startswith("coded_") for name in sizes):
            shown = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
            logging.info("weights in memory: %s", shown)

    def _pack(self, layer: Linear | Embedding, gated: bool, exact: bool) -> Matrix:
        if not layer.coded:
            return super()._pack(layer, gated, exact)
        first = layer.coded[0]
        panels, columns, groups = pack_coded(layer.coded, gated)
        layer.coded = ()
        order = None if first.order is None else self._keep(first.order.to(torch.int32))
        return Matrix(
            format=FORMATS[first.kind],
            panels=self._keep(panels),
            panel_units=panels.stride(0),
            bias=self._bias(layer, gated, panels.shape[0] * LANES),
            columns=columns,
            panel_count=panels.shape[0],
            depth=groups,
            order=order,
            inputs=first.shape[1],
        )


@dataclass(frozen=True, slots=True)
class _Joined:
    """The rows of all parts of a matrix, as in CodedRows."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "_Joined":
        zero = None if self.zero is None else change(self.zero)
        return _Joined(change(self.codes), change(self.scale), zero)


def pack_coded(parts: Sequence[CodedRows], gated: bool) -> tuple[Tensor, int, int]:
    """Join rows that are coded alike, and pack them.

    Args:
        parts: The rows.
        gated: The outputs are gate and up, whose panels alternate.

    Returns:
        Panels [panels, panel_units] int32, the number of outputs, and of groups of 32 inputs.
    """
    first = parts[0]
    rows = _join(parts)
    rows = rows.map_rows(interleave) if gated else rows
    columns, inputs = rows.codes.shape
    codes = F.pad(rows.codes, (0, -inputs % GROUP_SIZE), value=MIDDLES.get(first.kind, 0))
    groups = codes.shape[1] // GROUP_SIZE
    rows = replace(rows, codes=codes).map_rows(_split_in_sixteens)
    is_shared = bool((rows.scale == rows.scale[:, :1]).all())
    if is_shared:  # as the 16 columns of a panel are in one block
        rows = replace(rows, scale=rows.scale[:, :1].float())
    scale_type = SHARED_SCALE if is_shared else SCALE_TYPES[rows.scale.dtype]
    header = _header(first, scale_type, rows.zero is not None, groups).expand(len(rows.codes), -1)
    pieces = [header, _code_bytes(first.kind, rows.codes), _bytes(rows.scale)]
    if rows.zero is not None:
        pieces.append(_bytes(rows.zero))
    panels = torch.cat(pieces, 1)
    kept = allocate(panels.numel()).view(panels.shape).copy_(panels).view(torch.int32)
    return kept, columns, groups


def _join(parts: Sequence[CodedRows]) -> _Joined:
    """Join rows; zeros that are all in the middle of the codes are left out."""
    codes = torch.cat([part.unpack() for part in parts])
    dtypes = {part.scale.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    scale = torch.cat([part.scale.to(dtype) for part in parts])
    zeros = [part.zero for part in parts if part.zero is not None]
    zero = torch.cat(zeros) if zeros else None
    if zero is not None and bool((zero == MIDDLES[parts[0].kind]).all()):
        zero = None
    return _Joined(codes, scale, zero)


def _header(part: CodedRows, scale_type: int, has_zeros: bool, groups: int) -> Tensor:
    """Return the bytes [1, 128] of the header of each panel."""
    numbers = torch.zeros(2 * HEADER_INTS, dtype=torch.int32)
    is_whole = part.group_size == part.shape[1]
    numbers[0] = groups if is_whole else part.group_size // GROUP_SIZE
    numbers[1], numbers[2] = scale_type, has_zeros
    if part.table is not None:
        numbers[HEADER_INTS:] = part.table.view(torch.int32)
    return numbers.view(torch.uint8)[None]


def _code_bytes(kind: CodeKind, codes: Tensor) -> Tensor:
    """Pack codes [panels, 16, inputs] to [panels, bytes]."""
    if kind in MIDDLES:
        # [panels, groups, units, 16, 4]: four neighbouring inputs of a column are a unit.
        units: Tensor = codes.view(*codes.shape[:2], -1, GROUP_SIZE // UNIT_BYTES, UNIT_BYTES)
        units = units.permute(0, 2, 3, 1, 4)
        if kind is CodeKind.INT4:
            low, high = units.chunk(2, 2)
            units = low | high << 4
        return units.flatten(1)
    columns = codes.transpose(1, 2)  # [panels, inputs, 16]
    if kind is CodeKind.TABLE4:
        columns = columns[:, ::2] | columns[:, 1::2] << 4
    return columns.flatten(1)


def _bytes(factors: Tensor) -> Tensor:
    """Convert scales or zeros [panels, 16, groups] to [panels, bytes], the columns innermost."""
    return factors.transpose(1, 2).flatten(1).contiguous().view(torch.uint8)


def _split_in_sixteens(rows: Tensor) -> Tensor:
    """Pad and reshape [outputs, ...] to [panels, 16, ...]."""
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(rows) % LANES]
    padded: Tensor = F.pad(rows, padding)
    return padded.view(-1, LANES, *padded.shape[1:])
