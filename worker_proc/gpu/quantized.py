"""Multiply by quantized weights on a GPU as they are stored, by the kernels of humming-kernels.

`KernelRows` are rows in the form that the kernels take; `kernel_rows` converts the rows of a GGUF
or of a quantized checkpoint to it, or says why it cannot. `pack_model` replaces the weights of a
loaded model by packed products.

https://github.com/vllm-project/humming
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.models.layers import Embedding, Linear
from worker_proc.models.quantized_weights import (
    CODE_VALUES,
    GROUP,
    MXFP4_VALUES,
    ZERO_CODES,
    Blocks,
    CodedRows,
    CodeKind,
    PackedRows,
)

PACKAGE = "humming-kernels"
MEGABYTE = 1_000_000
# Inputs that may share a scale, besides all of a row: what the kernels were compiled for.
GROUP_SIZES = (16, 32, 64, 128, 256)
OUTPUT_MULTIPLE, INPUT_MULTIPLE = 64, 128  # to which the kernels' weights are padded
NUM_LOCKS = 2048  # int32 of a product, with which its programs add up their parts
GGUF_BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6,
}  # fmt: skip

Product = Callable[[Tensor], Tensor]


class Numbers(Enum):
    """What a code stands for, by the names of humming-kernels without the number of bits."""

    UNSIGNED = "uint"
    E4M3 = "float8e4m3"
    E2M1 = "float4e2m1"


class DoesNotFit(Exception):
    """Rows have a form that the kernels do not multiply; says which."""


@dataclass(frozen=True, slots=True)
class KernelRows:
    """Rows of a matrix with the values (number(code) - zero) * scale.

    Attributes:
        numbers: what a code stands for.
        bits: of a code.
        codes: [outputs, inputs] uint8.
        scale: [outputs, groups] in 16 bits; or uint8, the exponents of powers of two, plus 127.
        zero: [outputs, groups] uint8, or in 16 bits where it is no integer. None: the middle code
            of unsigned numbers, and 0 of floating-point numbers.
        order: [inputs] int64, the input that each column is multiplied by; None: in order.
    """

    numbers: Numbers
    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    order: Tensor | None = None

    @property
    def group_size(self) -> int:
        """Neighbouring columns that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes in the memory of a GPU, before outputs and inputs are padded."""
        outputs, inputs = self.codes.shape
        zero_bits = 0
        if self.zero is not None:
            is_integer = self.zero.dtype == torch.uint8
            zero_bits = (4 if self.bits <= 4 else 8) if is_integer else 16
        of_groups = self.scale.numel() * (8 * self.scale.element_size() + zero_bits)
        return (outputs * inputs * self.bits + of_groups) // 8

    def dense(self) -> Tensor:
        """Return the values [outputs, inputs] in float32, in the order of the inputs."""
        if self.numbers is Numbers.E4M3:
            values = self.codes.view(torch.float8_e4m3fn).float()
        elif self.numbers is Numbers.E2M1:
            table = torch.tensor(MXFP4_VALUES, device=self.codes.device).float() / 2
            values = table[self.codes.int()]
        else:
            values = self.codes.float()
            if self.zero is None:
                values -= 1 << self.bits - 1
        if self.zero is not None:
            values -= self._spread(self.zero.float())
        values *= self._spread(self._factors())
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order.to(values.device), values)

    def _factors(self) -> Tensor:
        if self.scale.dtype != torch.uint8:
            return self.scale.float()
        ones = torch.ones(self.scale.shape, device=self.scale.device)
        return torch.ldexp(ones, self.scale.int() - 127)

    def _spread(self, of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(self.group_size, 1)


def kernel_rows(rows: CodedRows | Blocks, dtype: torch.dtype) -> KernelRows:
    """Return rows of a checkpoint or of a GGUF in the form that the kernels take.

    Scales, and zeros that are no integers, are rounded to `dtype`.

    Raises:
        DoesNotFit: the kernels do not multiply such rows.
    """
    return _of_blocks(rows, dtype) if isinstance(rows, Blocks) else _of_coded(rows, dtype)


def _of_coded(rows: CodedRows, dtype: torch.dtype) -> KernelRows:
    if reason := why_not_coded(rows.kind, rows.group_size, rows.shape[1], rows.table):
        raise DoesNotFit(reason)
    scale, zero, bits = rows.scale.to(dtype), rows.zero, 8
    numbers = Numbers.E4M3
    if rows.kind is CodeKind.TABLE4:
        numbers, bits = Numbers.E2M1, 4
    elif rows.kind is not CodeKind.FLOAT8:
        numbers, bits = Numbers.UNSIGNED, 4 if rows.kind is CodeKind.INT4 else 8
        assert zero is not None
        if bool((zero == 1 << bits - 1).all()):
            zero = None
        elif int(zero.max()) >= 1 << bits:  # a GPTQ zero of 16
            zero = zero.to(dtype)
    return KernelRows(numbers, bits, rows.unpack(), scale, zero, rows.order)


def why_not_coded(
    kind: CodeKind, group_size: int, inputs: int, table: Tensor | None = None
) -> str:
    """Return why the kernels cannot multiply rows of a checkpoint; "" if they can.

    Args:
        kind: what a code stands for.
        group_size: neighbouring columns of a row that share a scale.
        inputs: columns.
        table: the values of the codes, for TABLE4.
    """
    if table is not None and table.tolist() != [value / 2 for value in MXFP4_VALUES]:
        return "codes of a table, such as nf4 and fp4 of bitsandbytes"
    if group_size != inputs and (group_size not in GROUP_SIZES or inputs % group_size):
        return f"groups of {group_size} of {inputs} inputs"
    return "" if kind in CodeKind else f"codes of {kind}"


def _of_blocks(rows: Blocks, dtype: torch.dtype) -> KernelRows:
    if reason := why_not_gguf(rows.kind):
        raise DoesNotFit(reason)
    outputs, groups, _ = rows.codes.shape
    codes = rows.codes.reshape(outputs, groups * GROUP)
    if rows.kind == "MXFP4":
        return KernelRows(Numbers.E2M1, 4, codes, rows.scale)
    bits = GGUF_BITS[rows.kind]
    scale = rows.parts(rows.scale.float(), rows.factor).flatten(1)
    if rows.minimum is None:
        middle = ZERO_CODES[rows.kind]
        assert middle == 1 << bits - 1
        return KernelRows(Numbers.UNSIGNED, bits, codes, scale.to(dtype))
    minimum = rows.parts(rows.minimum.float(), rows.least).flatten(1)
    least = minimum if rows.least is None else -minimum
    # A group of equal values has a scale of 0: its value becomes the scale, of the number 1.
    is_flat = scale.to(dtype) == 0
    codes = codes.masked_fill(is_flat.repeat_interleave(GROUP, 1), 1)
    scale = torch.where(is_flat, least, scale).to(dtype)
    zero = torch.where(is_flat, 0.0, -least / scale.float()).nan_to_num(0.0, 0.0, 0.0).to(dtype)
    return KernelRows(Numbers.UNSIGNED, bits, codes, scale, zero)


def why_not_gguf(kind: str) -> str:
    """Return why the kernels cannot multiply a type of GGUF; "" if they can."""
    if kind in GGUF_BITS or kind == "MXFP4":
        return ""
    if kind in CODE_VALUES:
        return f"{kind}, whose codes are places in a table"
    return f"{kind}, whose scales would take as much memory as its codes"


class DenseProduct:
    """The product of rows by torch, for tests without a GPU: the same numbers, in `dtype`."""

    def __init__(self, rows: KernelRows, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight, self._bias = rows.dense().to(dtype), bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class HummingProduct:
    """The product of rows by humming-kernels, which compile at the first call."""

    def __init__(
        self,
        rows: KernelRows,
        bias: Tensor | None,
        dtype: torch.dtype,
        deterministic: bool = False,
    ) -> None:
        """Pack rows, which are on a GPU.

        Args:
            rows: the weights.
            bias: [outputs], or None.
            dtype: of inputs and outputs, bfloat16 or float16.
            deterministic: the numbers of a row do not depend on the number of rows.
        """
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors

        outputs, inputs = rows.codes.shape
        is_whole = rows.scale.shape[1] == 1
        name = rows.numbers.value + (str(rows.bits) if rows.numbers is Numbers.UNSIGNED else "")
        schema = HummingWeightSchema(
            b_dtype=name,
            bs_dtype="float8e8m0" if rows.scale.dtype == torch.uint8 else None,
            weight_scale_group_size=0 if is_whole else rows.group_size,
            has_zero_point=rows.zero is not None,
            is_fp_zero_point=rows.zero is not None and rows.zero.dtype != torch.uint8,
        )
        tensors = _humming_tensors(rows, bias)
        self._config, self._tensors = prepare_and_transform_humming_tensors(
            tensors,
            outputs,
            inputs,
            schema,
            pad_n_to_multiple=OUTPUT_MULTIPLE,
            pad_k_to_multiple=INPUT_MULTIPLE,
            has_bias=bias is not None,
            torch_dtype=dtype,
            device=rows.codes.device,
        )
        self._order = rows.order
        self._locks = torch.zeros(NUM_LOCKS, dtype=torch.int32, device=rows.codes.device)
        self._compute = '{"use_batch_invariant": true}' if deterministic else None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(part.numel() * part.element_size() for part in self._tensors.values())

    def __call__(self, x: Tensor) -> Tensor:
        from humming.forward import humming_forward

        if self._order is not None:
            x = x.index_select(1, self._order)
        product: Tensor = humming_forward(
            self._config,
            x.contiguous(),
            locks=self._locks,
            compute_config=self._compute,
            **self._tensors,
        )
        return product


def _humming_tensors(rows: KernelRows, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a weight by the names of humming-kernels."""
    from humming import ops

    scale = rows.scale
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    tensors: dict[str, Any] = {
        "weight": ops.pack_weight(rows.codes.int().contiguous(), rows.bits),
        "weight_scale": scale.contiguous(),
    }
    if rows.zero is not None:
        zero = rows.zero
        if zero.dtype == torch.uint8:  # packed along the outputs
            zero = ops.pack_weight(zero.int().t().contiguous(), rows.bits).t()
        tensors["zero_point"] = zero.contiguous()
    if bias is not None:
        tensors["bias"] = bias
    return tensors


class JoinedProducts:
    """The outputs of several products of the same rows, one after the other."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([product(x) for product in self._products], -1)
