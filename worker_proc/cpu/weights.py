"""Round weights to fewer bits, and pack them into the panels that the kernels multiply.

Rounding to blocks of Q8_0 or Q4_1; panels of blocks, those of a GGUF among them; the packed weights
of a model by layer; panels of the codes of quantized checkpoints.
"""

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.errors import ModelError
from worker_proc.cpu.build import load_kernels
from worker_proc.cpu.memory import allocate
from worker_proc.cpu.pack_store import PackStore
from worker_proc.cpu.program import LANES, Format, Matrix
from worker_proc.models.layers import Embedding, Linear
from worker_proc.models.quantized_weights import (
    CHUNK_WEIGHTS,
    GROUP,
    Blocks,
    CodedRows,
    CodeKind,
    PackedRows,
)

# Round weights to 4 bits so that the products change as little as possible.
#
# For each group of 32 inputs the kernels try several scales and minima, fit each to its codes by
# least squares, and keep the best. The error of a weight counts by the importance of its input,
# as in activation-aware quantization (Lin et al. 2023, https://arxiv.org/abs/2306.00978) and
# ggml's importance matrices.

# Of the mean importance: an input that never differed from zero still has weights to round.
MIN_IMPORTANCE = 1e-6


def round_to_int4(weight: Tensor, importance: Tensor | None = None) -> Blocks:
    """Round a matrix to blocks of Q4_1.

    Args:
        weight: [outputs, inputs].
        importance: [inputs] factors of the squared errors; None: all are equal.
    """
    outputs, inputs = weight.shape
    padding = (0, -inputs % GROUP)
    values = F.pad(weight.float(), padding).contiguous()
    factors = F.pad(_factors(inputs, importance), padding).contiguous()
    num_groups = values.shape[1] // GROUP
    codes = torch.empty(outputs, num_groups, GROUP, dtype=torch.uint8)
    scale, minimum = torch.empty(2, outputs, num_groups)
    arrays, sizes = (codes, scale, minimum), (outputs, num_groups)
    _kernels().quadriga_round_to_int4(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (values, factors)),
        *map(ctypes.c_int64, sizes),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in arrays),
        ctypes.c_int64(torch.get_num_threads()),
    )
    return Blocks("Q4_1", codes, scale.half(), minimum.half())


def _factors(inputs: int, importance: Tensor | None) -> Tensor:
    """Return positive factors [inputs] float32 whose mean is about 1."""
    if importance is None or not importance.any():
        return torch.ones(inputs)
    relative = importance.float() / importance.float().mean()
    return relative + MIN_IMPORTANCE


@cache
def _kernels() -> ctypes.CDLL:
    return load_kernels()


@cache
def _has_paired_codes() -> bool:
    return bool(_kernels().quadriga_paired_codes())


GROUP_SIZE = GROUP  # neighbouring inputs that share a scale
MIN_SCALE = 1e-8  # a group whose scale is smaller becomes all zeros


def quantize(weight: Tensor, bits: int, importance: Tensor | None = None) -> Blocks:
    """Round a matrix [outputs, inputs].

    8 bits are symmetric around zero. In 4 bits the scale and minimum of a group have the least
    squared error, by the importance [inputs] of the inputs.
    """
    return _round_to_int8(weight) if bits == 8 else round_to_int4(weight, importance)


def _round_to_int8(weight: Tensor) -> Blocks:
    groups = F.pad(weight.float(), (0, -weight.shape[1] % GROUP_SIZE))
    groups = groups.unflatten(1, (-1, GROUP_SIZE))
    scale = (groups.abs().amax(-1) / 127).half()
    divisor = scale.float().clamp(min=MIN_SCALE).unsqueeze(-1)
    codes = (groups / divisor).round().clamp(-127, 127)
    return Blocks("Q8_0", codes.to(torch.int8).view(torch.uint8) ^ 128, scale)


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
        parts: rows of the matrix, in order.
        gated: the first half of the rows is the gate and the second one up, of which panels
            alternate.

    Returns:
        The formats of the panels, and the panels [panel_units] int32, in one piece of memory.

    Raises:
        ModelError: a panel would have rows of two types.
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
    """Pack codes [panels, 16, groups, 32] into [panels, bytes]: [groups][stored lines][16][4].

    Line k of a group is in stored line k % bits of a plane, see csrc/quantized/codes.h.
    """
    units = codes.unflatten(3, (-1, UNIT_BYTES)).permute(0, 2, 3, 1, 4)
    lines, stored, below = lines_of(units, _has_paired_codes()), [], 0
    for bits in planes:
        field = (lines >> below) & ((1 << bits) - 1)
        folded = field[:, :, :bits].clone()
        for k in range(bits, field.shape[2], bits):
            folded |= field[:, :, k : k + bits] << k
        stored.append(folded)
        below += bits
    return torch.cat(stored, 2).flatten(1)


def lines_of(units: Tensor, paired: bool) -> Tensor:
    """Arrange the units of groups in lines, as csrc/isa/integers.h describes.

    Args:
        units: [..., 8 units, 16 columns, 4] codes.
        paired: a line has two neighbouring units of eight columns; otherwise one of 16 columns.

    Returns:
        [..., 8 lines, 16 words, 4].
    """
    if not paired:
        return units
    pairs = units.unflatten(-2, (2, -1)).unflatten(-4, (-1, 2))  # [pairs, 2, 2, 8 columns, 4]
    lines: Tensor = pairs.movedim(-4, -2).flatten(-3, -2).flatten(-4, -3)
    return lines


def _lanes_last(values: Tensor) -> Tensor:
    """Turn [panels, 16, ...] into the bytes [panels, bytes] of [...][16]."""
    return values.movedim(1, -1).contiguous().view(torch.uint8).flatten(1)


def _split_in_sixteens(rows: Tensor) -> Tensor:
    """Pad and reshape [outputs, ...] to [panels, 16, ...]."""
    padding = [0, 0] * (rows.dim() - 1) + [0, -len(rows) % LANES]
    return torch.unflatten(F.pad(rows, padding), 0, (-1, LANES))


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple


class PackedWeights:
    """Packed weights by layer, and every tensor that the kernels point to.

    Packing a layer frees the layer's own weight.
    """

    def __init__(
        self, bits: int | None = None, store: PackStore | None = None, paired: bool = False
    ) -> None:
        """Keep weights as they are, or quantize them.

        Args:
            bits: 8 or 4, to quantize dense weights; None: weights stay dense, or packed as in a
                GGUF.
            store: has the packed weights of an earlier worker, or takes these; None: neither.
            paired: dense panels have two neighbouring units of a column side by side.
        """
        self._bits, self._paired = bits, paired
        self._store = store
        self._matrices: dict[nn.Module, Matrix] = {}
        self._kept: list[Tensor] = []
        self._arrays: list[ctypes.Array[Matrix]] = []

    def matrix(self, layer: Linear | Embedding, gated: bool = False, exact: bool = False) -> Matrix:
        """Return the packed weight of a layer.

        Args:
            layer: the layer.
            gated: its outputs are gate and up.
            exact: its weight is not rounded to fewer bits.
        """
        if layer not in self._matrices:
            name = f"{len(self._matrices)} {type(layer).__name__}{' gated' if gated else ''}"
            self._matrices[layer] = self._stored(name) or self._packed(name, layer, gated, exact)
            del layer.weight
            layer.blocks, layer.coded = (), ()
        return self._matrices[layer]

    def _stored(self, name: str) -> Matrix | None:
        """Return the matrix of an earlier worker; None without one."""
        found = None if self._store is None else self._store.next(name)
        if found is None:
            return None
        matrix, tensors = found
        self._kept += tensors
        return matrix

    def _packed(self, name: str, layer: Linear | Embedding, gated: bool, exact: bool) -> Matrix:
        num_before = len(self._kept)
        matrix = self._pack(layer, gated, exact)
        if self._store is not None:
            self._store.take(name, matrix, self._kept[num_before:])
        return matrix

    def close_store(self) -> None:
        """Give the packed weights to the store, whose next user reads them."""
        if self._store is not None:
            self._store.close()

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
            panels = to_panels(weight, self._paired)
            depth = -(-weight.shape[1] * weight.itemsize // UNIT_BYTES)
            return self._uniform(layer, gated, Format.DENSE, panels, len(weight), depth)
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


def to_panels(weight: Tensor, paired: bool = False) -> Tensor:
    """Pack [outputs, inputs] into zero-padded panels [panels, units, 16] int32.

    A panel has 16 outputs side by side, and for each unit the 4 bytes of one float32 input or of
    two bfloat16 inputs.

    Args:
        weight: the weight.
        paired: the units are [units / 2][16][2], and their number is even.
    """
    units = panels_of(weight)
    if paired:
        units = F.pad(units, (0, 0, 0, units.shape[1] % 2))
        units = units.unflatten(1, (-1, 2)).transpose(2, 3)
    panels = allocate(units.numel() * UNIT_BYTES).view(torch.int32)
    return panels.view(units.shape).copy_(units).view(len(units), -1, LANES)


def panels_of(weight: Tensor) -> Tensor:
    """Return the panels of `to_panels`, not paired and not contiguous."""
    inputs_per_unit = UNIT_BYTES // weight.dtype.itemsize
    outputs, inputs = weight.shape
    weight = _padded(weight, (0, -inputs % inputs_per_unit, 0, -outputs % LANES)).contiguous()
    units = weight.view(torch.int32).view(-1, LANES, weight.shape[1] // inputs_per_unit)
    return units.transpose(1, 2)


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


HEADER_INTS = 16
SCALE_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
SHARED_SCALE = 3
CODED_FORMATS = {
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
            format=CODED_FORMATS[first.kind],
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
        parts: the rows.
        gated: the outputs are gate and up, whose panels alternate.

    Returns:
        Panels [panels, panel_units] int32, the number of outputs, and of groups of 32 inputs.
    """
    first = parts[0]
    rows = _join_coded(parts)
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
    pieces = [header, _code_bytes(first.kind, rows.codes), _factor_bytes(rows.scale)]
    if rows.zero is not None:
        pieces.append(_factor_bytes(rows.zero))
    panels = torch.cat(pieces, 1)
    kept = allocate(panels.numel()).view(panels.shape).copy_(panels).view(torch.int32)
    return kept, columns, groups


def _join_coded(parts: Sequence[CodedRows]) -> _Joined:
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
        lines = lines_of(units.permute(0, 2, 3, 1, 4), _has_paired_codes())
        if kind is CodeKind.INT4:
            low, high = lines.chunk(2, 2)
            lines = low | high << 4
        return lines.flatten(1)
    columns = codes.transpose(1, 2)  # [panels, inputs, 16]
    if kind is CodeKind.TABLE4:
        columns = columns[:, ::2] | columns[:, 1::2] << 4
    return columns.flatten(1)


def _factor_bytes(factors: Tensor) -> Tensor:
    """Convert scales or zeros [panels, 16, groups] to [panels, bytes], the columns innermost."""
    return factors.transpose(1, 2).flatten(1).contiguous().view(torch.uint8)
