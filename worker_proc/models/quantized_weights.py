"""The forms in which a layer keeps quantized weights: blocks of a GGUF, codes of a checkpoint.

`PackedRows` are rows of a matrix as they are in a GGUF, and unpack to `Blocks`. `CodedRows` are
codes and scales, the form of all quantized safetensors checkpoints. The kernels of a CPU multiply
both as they are; `dense` returns the values.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.server.models.formats.quantization import BLOCK_SIZES

# Decode the block types of GGUF.
#
# Source: https://github.com/ggml-org/ggml, ggml-common.h and ggml-quants.c.

GROUP = 32  # weights; blocks of 256 have 8 groups
CHUNK_WEIGHTS = 1 << 22  # that are decoded at a time
# The values of codes of 4 bits in IQ4_NL and IQ4_XS, and twice those of MXFP4.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
CODE_VALUES = {"IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES, "MXFP4": MXFP4_VALUES}
# The code of the value 0 in types that have no table of values.
ZERO_CODES = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128, "Q3_K": 4, "Q6_K": 32}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Unpacked blocks, with the values (code - zero) * scale * factor - minimum * least.

    The minimum is added if there is no `least`.

    Attributes:
        kind: the type, one of BLOCK_SIZES.
        codes: [rows, groups, 32] uint8.
        scale: [rows, blocks] float16; MXFP4: uint8 exponents.
        minimum: [rows, blocks] float16, or None.
        factor: [rows, groups, parts] int8 factors of a group or of its halves; None: 1.
        least: factors of the minimum, likewise.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    factor: Tensor | None = None
    least: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the values [rows, weights of a row] in float32."""
        rows, groups, _ = self.codes.shape
        parts = 1 if self.factor is None else self.factor.shape[2]
        scale = _powers(self.scale) if self.kind == "MXFP4" else self.scale.float()
        scale = self.parts(scale, self.factor)
        values = self._values().view(rows, groups, parts, -1).mul_(scale.unsqueeze(-1))
        if self.minimum is not None:
            minimum = self.minimum.float()
            minimum = self.parts(minimum if self.least is None else -minimum, self.least)
            values.add_(minimum.unsqueeze(-1))
        return values.flatten(1)

    def _values(self) -> Tensor:
        if self.kind in CODE_VALUES:
            return torch.tensor(CODE_VALUES[self.kind]).float()[self.codes.int()]
        return self.codes.float().sub_(ZERO_CODES.get(self.kind, 0))

    def parts(self, of_blocks: Tensor, factors: Tensor | None) -> Tensor:
        """Spread [rows, blocks] over the parts of groups: [rows, groups, parts or 1]."""
        groups_per_block = self.codes.shape[1] // max(1, of_blocks.shape[1])
        of_groups = of_blocks.repeat_interleave(groups_per_block, 1).unsqueeze(-1)
        return of_groups if factors is None else of_groups * factors.float()


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of a matrix as they are in the file.

    Attributes:
        kind: one of BLOCK_SIZES.
        data: [rows, bytes of a row] uint8.
        name: file and name of the tensor, for messages.
    """

    kind: str
    data: Tensor
    name: str = ""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and of weights in a row."""
        rows, row_bytes = self.data.shape
        size = BLOCK_SIZES[self.kind]
        return rows, row_bytes // size.num_bytes * size.weights

    def unpack(self) -> Blocks:
        """Return the codes, scales and minima of the blocks."""
        rows, width = self.shape
        data = self.data.reshape(rows, -1, BLOCK_SIZES[self.kind].num_bytes)
        fields = _DECODERS[self.kind](data)
        codes = fields.pop("codes").reshape(rows, width // GROUP, GROUP)
        for name in ("factor", "least"):
            if name in fields:
                fields[name] = fields[name].reshape(rows, width // GROUP, -1).view(torch.int8)
        return Blocks(self.kind, codes, **fields)

    def dense(self) -> Tensor:
        """Return the values [rows, weights of a row] in float32."""
        rows, width = self.shape
        step = max(1, CHUNK_WEIGHTS // max(1, width))
        if rows <= step:
            return self.unpack().dense()
        values = torch.empty(rows, width)
        for first in range(0, rows, step):
            part = PackedRows(self.kind, self.data[first : first + step])
            values[first : first + step] = part.unpack().dense()
        return values


# --- decoders: blocks [rows, blocks, bytes of a block] to the fields of Blocks --------------------

_Fields = dict[str, Tensor]


def _half(block: Tensor, at: int) -> Tensor:
    """Return the float16 [rows, blocks] at a byte of each block."""
    return block[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _bits(packed: Tensor, shifts: range, bits: int) -> Tensor:
    """Split [..., bytes] into [..., shifts, bytes] numbers of `bits` bits."""
    # A shift by a tensor of numbers is not vectorized, and takes ten times as long.
    return torch.stack([(packed >> shift) & ((1 << bits) - 1) for shift in shifts], -2)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """Return codes of 4 bits [..., 2 * bytes]: in each `run` bytes low halves, then high."""
    return _bits(packed.unflatten(-1, (-1, run)), range(0, 8, 4), 4).flatten(-3)


def _fifth_bits(block: Tensor, at: int) -> Tensor:
    """Return 16 times each bit [..., 32] of the four bytes at `at`."""
    shifts = torch.arange(8, dtype=torch.uint8, device=block.device)
    bits = (block[..., at : at + 4].unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2) << 4


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and minima [..., 8] of 6 bits in the 12 bytes of Q4_K and Q5_K."""
    factors, minima, rest = packed.split(4, -1)
    return (
        torch.cat((factors & 63, (rest & 15) | (factors >> 2 & 48)), -1),
        torch.cat((minima & 63, (rest >> 4) | (minima >> 2 & 48)), -1),
    )


def _q4_0(block: Tensor) -> _Fields:
    return {"codes": _nibbles(block[..., 2:], 16), "scale": _half(block, 0)}


def _q4_1(block: Tensor) -> _Fields:
    codes = _nibbles(block[..., 4:], 16)
    return {"codes": codes, "scale": _half(block, 0), "minimum": _half(block, 2)}


def _q5_0(block: Tensor) -> _Fields:
    codes = _nibbles(block[..., 6:], 16) | _fifth_bits(block, 2)
    return {"codes": codes, "scale": _half(block, 0)}


def _q5_1(block: Tensor) -> _Fields:
    codes = _nibbles(block[..., 8:], 16) | _fifth_bits(block, 4)
    return {"codes": codes, "scale": _half(block, 0), "minimum": _half(block, 2)}


def _q8_0(block: Tensor) -> _Fields:
    return {"codes": block[..., 2:] ^ 128, "scale": _half(block, 0)}


def _q2_k(block: Tensor) -> _Fields:
    codes = _bits(block[..., 16:80].unflatten(-1, (2, 32)), range(0, 8, 2), 2)
    return {
        "codes": codes,
        "scale": _half(block, 80),
        "minimum": _half(block, 82),
        "factor": block[..., :16] & 15,
        "least": block[..., :16] >> 4,
    }


def _q3_k(block: Tensor) -> _Fields:
    low = _bits(block[..., 32:96].unflatten(-1, (2, 32)), range(0, 8, 2), 2)
    high = _bits(block[..., :32], range(8), 1).view(low.shape)
    factors = _nibbles(block[..., 96:104], 8)
    factors = factors | _bits(block[..., 104:108], range(0, 8, 2), 2).flatten(-2) << 4
    return {"codes": low | high << 2, "scale": _half(block, 108), "factor": factors - 32}


def _q4_k(block: Tensor) -> _Fields:
    factor, least = _six_bits(block[..., 4:16])
    return {
        "codes": _nibbles(block[..., 16:], 32),
        "scale": _half(block, 0),
        "minimum": _half(block, 2),
        "factor": factor,
        "least": least,
    }


def _q5_k(block: Tensor) -> _Fields:
    factor, least = _six_bits(block[..., 4:16])
    high = _bits(block[..., 16:48], range(8), 1).flatten(-2)
    return {
        "codes": _nibbles(block[..., 48:], 32) | high << 4,
        "scale": _half(block, 0),
        "minimum": _half(block, 2),
        "factor": factor,
        "least": least,
    }


def _q6_k(block: Tensor) -> _Fields:
    low = _nibbles(block[..., :128], 64)
    high = _bits(block[..., 128:192].unflatten(-1, (2, 32)), range(0, 8, 2), 2).flatten(-3)
    return {"codes": low | high << 4, "scale": _half(block, 208), "factor": block[..., 192:208]}


def _iq4_xs(block: Tensor) -> _Fields:
    low = _bits(block[..., 4:8], range(0, 8, 4), 4).transpose(-1, -2).flatten(-2)
    high = _bits(block[..., 2:4], range(0, 8, 2), 2).transpose(-1, -2).flatten(-2)
    factor = (low | high << 4) - 32
    return {"codes": _nibbles(block[..., 8:], 16), "scale": _half(block, 0), "factor": factor}


def _mxfp4(block: Tensor) -> _Fields:
    return {"codes": _nibbles(block[..., 1:], 16), "scale": block[..., 0]}


_DECODERS: dict[str, Callable[[Tensor], _Fields]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _powers(exponents: Tensor) -> Tensor:
    """Return 2^(e - 128) for bytes e, in float32."""
    ones = torch.ones(exponents.shape, device=exponents.device)
    return torch.ldexp(ones, exponents.int() - 128)


class CodeKind(enum.Enum):
    """What a code stands for.

    INT4, INT8: The integer code - zero. FLOAT8: A float8_e4m3fn. TABLE4: An entry of a table.
    MXFP4: A float4_e2m1, with scales that are powers of two.
    """

    INT4 = enum.auto()
    INT8 = enum.auto()
    FLOAT8 = enum.auto()
    TABLE4 = enum.auto()
    MXFP4 = enum.auto()


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A quantized matrix, with the values number(code) * scale.

    Attributes:
        kind: what a code stands for.
        shape: outputs and inputs.
        group_size: neighbouring columns of a row that share a scale.
        packed: the codes as they are in the file.
        decode: returns the codes [outputs, inputs] uint8 of `packed`, on its device.
        scale: [outputs, groups] in float16, bfloat16 or float32; MXFP4: uint8, the exponents of
            powers of two, plus 127.
        zero: [outputs, groups] uint8, for integers; else None.
        table: [16] float32, for TABLE4; else None.
        order: [inputs] int64, the input that each column is multiplied by; None: in order.
        stored_bytes: bytes of the tensors in the file.
    """

    kind: CodeKind
    shape: tuple[int, int]
    group_size: int
    packed: Tensor
    decode: Callable[[Tensor], Tensor]
    scale: Tensor
    zero: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None
    stored_bytes: int = 0

    def unpack(self) -> Tensor:
        """Return the codes [outputs, inputs] uint8."""
        return self.decode(self.packed)

    def to(self, device: torch.device) -> "CodedRows":
        """Return the rows on another device."""
        return dataclasses.replace(
            self,
            packed=self.packed.to(device),
            scale=self.scale.to(device),
            zero=None if self.zero is None else self.zero.to(device),
            table=None if self.table is None else self.table.to(device),
            order=None if self.order is None else self.order.to(device),
        )

    def take(self, rows: Tensor) -> "CodedRows":
        """Return the rows of these numbers."""
        part = len(rows) / self.shape[0]
        return dataclasses.replace(
            self,
            shape=(len(rows), self.shape[1]),
            decode=lambda packed: self.decode(packed)[rows],
            scale=self.scale[rows],
            zero=None if self.zero is None else self.zero[rows],
            stored_bytes=int(self.stored_bytes * part),
        )

    def dense(self) -> Tensor:
        """Return the values [outputs, inputs] in float32, in the order of the inputs."""
        is_power = self.kind is CodeKind.MXFP4
        scale = 2 * _powers(self.scale) if is_power else self.scale.float()
        values = self._numbers().mul_(self._spread(scale))
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)

    def _numbers(self) -> Tensor:
        """Return what the codes stand for, [outputs, inputs] float32."""
        codes = self.unpack()
        if self.kind is CodeKind.FLOAT8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.kind is CodeKind.MXFP4:
            return torch.tensor(MXFP4_VALUES, device=codes.device).float().div_(2)[codes.int()]
        if self.table is not None:
            return self.table[codes.int()]
        assert self.zero is not None
        return codes.float().sub_(self._spread(self.zero.float()))

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat [outputs, groups] to [outputs, inputs]."""
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]


@dataclass(frozen=True, slots=True)
class StackedRows:
    """The matrices of one projection of all experts in MXFP4, as a checkpoint of gpt-oss has them.

    Format: OCP Microscaling Formats 1.0, https://www.opencompute.org/documents.

    Attributes:
        codes: [experts, outputs, groups, 16] uint8, two codes in a byte, the first in the low half.
        scales: [experts, outputs, groups] uint8, exponents of 2 plus 127.
    """

    codes: Tensor
    scales: Tensor

    def __iter__(self) -> Iterator[CodedRows]:
        """Yield the rows of each expert."""
        for codes, scales in zip(self.codes, self.scales, strict=True):
            yield self._rows(codes, scales)

    def halves(self, interleaved: bool) -> Iterator[tuple[CodedRows, CodedRows]]:
        """Yield the gate and up rows of each expert, which take turns if they are interleaved."""
        half = self.codes.shape[1] // 2
        parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (
            slice(0, half), slice(half, None)
        )  # fmt: skip
        for codes, scales in zip(self.codes, self.scales, strict=True):
            gate, up = (self._rows(codes[part], scales[part]) for part in parts)
            yield gate, up

    @staticmethod
    def _rows(codes: Tensor, scales: Tensor) -> CodedRows:
        outputs, groups, _ = codes.shape
        return CodedRows(
            CodeKind.MXFP4,
            (outputs, groups * GROUP),
            GROUP,
            codes,
            _low_halves_first,
            scale=scales,
            stored_bytes=codes.numel() + scales.numel(),
        )


def _low_halves_first(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
