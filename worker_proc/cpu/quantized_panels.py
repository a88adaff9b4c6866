"""Lay out quantized rows in the panels that csrc/quantized/ multiplies."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from quadriga.errors import ModelError
from worker_proc.cpu.memory import allocate
from worker_proc.cpu.program import LANES, Format
from worker_proc.loading.gguf_blocks import CHUNK_WEIGHTS, Blocks, PackedRows

UNIT_BYTES = 4
PANEL_ALIGNMENT_BYTES = 64
# Q8_0 and Q4_1 are also the formats of weights that are rounded at load.
FORMATS = {"Q8_0": Format.INT8, "Q4_1": Format.INT4}
# Bits of the planes of a code, lowest first.
PLANES = {
    "Q4_0": (4,),
    "Q4_1": (4,),
    "Q5_0": (4, 1),
    "Q5_1": (4, 1),
    "Q8_0": (8,),
    "Q2_K": (2,),
    "Q3_K": (2, 1),
    "Q4_K": (4,),
    "Q5_K": (4, 1),
    "Q6_K": (4, 2),
    "IQ4_NL": (4,),
    "IQ4_XS": (4,),
    "MXFP4": (4,),
}


def format_of(kind: str) -> Format:
    """Return the format of the panels of a type of GGUF."""
    return FORMATS.get(kind) or Format[kind]


def to_quantized_panels(rows: Blocks) -> Tensor:
    """Lay out quantized rows in padded panels [panels, panel_units] int32.

    A panel is the codes of 16 outputs, then their scales, see csrc/quantized/formats.h.
    """
    panels = _panel_bytes(rows)
    return allocate(panels.numel()).view(panels.shape).copy_(panels).view(torch.int32)


def pack_rows(rows: PackedRows) -> Tensor:
    """Lay out rows of a file in padded panels [panels, panel_units] int32, some rows at a time."""
    num_panels, panels, filled = -(-len(rows.data) // LANES), torch.empty(0, 0), 0
    for part in _in_chunks(rows):
        if filled == 0:
            panels = allocate(num_panels * part.shape[1]).view(num_panels, -1)
        panels[filled : filled + len(part)] = part
        filled += len(part)
    return panels.view(torch.int32)


def join_alike(parts: Sequence[PackedRows]) -> list[PackedRows]:
    """Join neighbouring parts of the same type."""
    joined = []
    for _, (first, *others) in groupby(parts, lambda part: part.kind):
        data = [first.data, *(part.data for part in others)]
        joined.append(replace(first, data=data[0] if len(data) == 1 else torch.cat(data)))
    return joined


def pack_mixed(parts: Sequence[PackedRows], gated: bool) -> tuple[list[Format], list[Tensor]]:
    """Lay out parts of several types, each panel in the type of its rows.

    Args:
        parts: Rows of the matrix, in order.
        gated: The first half of the rows is the gate and the second one up, of which panels
            alternate.

    Returns:
        The formats of the panels, and the panels [panel_units] int32, in one piece of memory.

    Raises:
        ModelError: A panel would have rows of two types.
    """
    if gated:
        half = sum(len(part.data) for part in parts) // 2
        gate, up = _split_rows(parts, half)
        pairs = zip(_panels_of(gate), _panels_of(up), strict=True)
        panels = [panel for pair in pairs for panel in pair]
    else:
        panels = _panels_of(parts)
    memory = allocate(sum(words.numel() for _, words in panels) * UNIT_BYTES).view(torch.int32)
    kept = list(memory.split([words.numel() for _, words in panels]))
    for place, (_, words) in zip(kept, panels, strict=True):
        place.copy_(words)
    return [panel_format for panel_format, _ in panels], kept


def _panels_of(parts: Sequence[PackedRows]) -> list[tuple[Format, Tensor]]:
    joined = join_alike(parts)
    for part, after in pairwise(joined):
        if len(part.data) % LANES:
            raise ModelError(
                f"{part.name} has {len(part.data)} rows in {part.kind} before rows in"
                f" {after.kind}, and the kernels need a multiple of {LANES}: take a file with one"
                " type, or --quantization int8"
            )
    return [
        (format_of(part.kind), words)
        for part in joined
        for panels in _in_chunks(part)
        for words in panels.view(torch.int32)
    ]


def _in_chunks(rows: PackedRows) -> Iterator[Tensor]:
    """Yield panels [panels, bytes of a panel] uint8, some rows at a time."""
    count, width = rows.shape
    step = max(1, CHUNK_WEIGHTS // width // LANES) * LANES
    for first in range(0, count, step):
        yield _panel_bytes(replace(rows, data=rows.data[first : first + step]).unpack())


def _split_rows(
    parts: Sequence[PackedRows], count: int
) -> tuple[list[PackedRows], list[PackedRows]]:
    """Split parts after `count` rows."""
    first: list[PackedRows] = []
    second: list[PackedRows] = []
    for part in parts:
        size = min(max(count, 0), len(part.data))
        count -= len(part.data)
        if size:
            first.append(replace(part, data=part.data[:size]))
        if size < len(part.data):
            second.append(replace(part, data=part.data[size:]))
    return first, second


def _panel_bytes(rows: Blocks) -> Tensor:
    """Return panels [panels, bytes of a panel] uint8."""
    arrays = [_planes(_split_in_sixteens(rows.codes), PLANES[rows.kind])]
    factor, least = rows.factor, rows.least
    if rows.kind == "Q2_K" and factor is not None and least is not None:
        factor, least = factor | least << 4, None
    for values in (rows.scale, rows.minimum, factor, least):
        if values is not None:
            arrays.append(_lanes_last(_split_in_sixteens(values)))
    panels = torch.cat(arrays, 1)
    return F.pad(panels, (0, -panels.shape[1] % PANEL_ALIGNMENT_BYTES))


def _planes(codes: Tensor, planes: tuple[int, ...]) -> Tensor:
    """Pack codes [panels, 16, groups, 32] into [panels, bytes]: [groups][lines][16][4].

    Unit k of a group (its codes 4 k and on) is in line k % bits of a plane, see
    csrc/quantized/codes.h.
    """
    units = codes.unflatten(3, (-1, UNIT_BYTES)).permute(0, 2, 3, 1, 4)
    lines, below = [], 0
    for bits in planes:
        field = (units >> below) & ((1 << bits) - 1)
        folded = field[:, :, :bits].clone()
        for k in range(bits, field.shape[2], bits):
            folded |= field[:, :, k : k + bits] << k
        lines.append(folded)
        below += bits
    return torch.cat(lines, 2).flatten(1)


def _lanes_last(values: Tensor) -> Tensor:
    """Turn [panels, 16, ...] into the bytes [panels, bytes] of [...][16]."""
    return values.movedim(1, -1).contiguous().view(torch.uint8).flatten(1)


def _split_in_sixteens(rows: Tensor) -> Tensor:
    """Pad and reshape [outputs, ...] to [panels, 16, ...]."""
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(rows) % LANES]
    return torch.unflatten(F.pad(rows, padding), 0, (-1, LANES))
