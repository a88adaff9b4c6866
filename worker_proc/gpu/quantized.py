"""Multiply by quantized weights on a GPU as they are stored, by the kernels of humming-kernels.

`KernelRows` are rows in the form that the kernels take; `kernel_rows` converts the rows of a GGUF
or of a quantized checkpoint to it, or says why it cannot, and `round_rows` makes them of a dense
matrix. `pack_model` moves a loaded model to the GPU and gives its layers such products.

https://github.com/vllm-project/humming
"""

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quadriga.programs import install_command
from worker_proc.models.layers import Embedding, Experts, Linear
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
MIN_CAPABILITY = (7, 5)
MEGABYTE = 1_000_000
CHUNK_OUTPUTS = 8192  # of a matrix that are converted at a time, so that numbers of 4 bytes fit
MIN_SCALE = 1e-8  # a group whose scale is smaller becomes all zeros
# Inputs that may share a scale, besides all of a row: what the kernels were compiled for.
GROUP_SIZES = (16, 32, 64, 128, 256)
OUTPUT_MULTIPLE = INPUT_MULTIPLE = 128  # to which the kernels' weights are padded
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

    def split(self) -> "Iterator[KernelRows]":
        """Yield the rows, some at a time."""
        for first in range(0, len(self.codes), CHUNK_OUTPUTS):
            part = slice(first, first + CHUNK_OUTPUTS)
            zero = None if self.zero is None else self.zero[part]
            yield replace(self, codes=self.codes[part], scale=self.scale[part], zero=zero)

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
    if rows.kind is CodeKind.MXFP4:
        return KernelRows(Numbers.E2M1, 4, rows.unpack(), rows.scale)
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


def why_not_coded(kind: CodeKind, group_size: int, inputs: int, table: Tensor | None = None) -> str:
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
        self.num_bytes = rows.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply rows [rows, inputs] to [rows, outputs]."""
        return F.linear(x, self._weight, self._bias)


class PackedProduct:
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
        from humming.transform import prepare_and_transform_humming_tensors

        outputs, inputs = rows.codes.shape
        tensors = humming_tensors(rows, bias)
        self._config, self._tensors = prepare_and_transform_humming_tensors(
            tensors,
            outputs,
            inputs,
            humming_schema(rows),
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
        """Multiply rows [rows, inputs] to [rows, outputs]."""
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


def humming_schema(rows: KernelRows) -> Any:
    """Return the form of a weight in the words of humming-kernels."""
    from humming.schema import HummingWeightSchema

    is_whole = rows.scale.shape[1] == 1
    name = rows.numbers.value + (str(rows.bits) if rows.numbers is Numbers.UNSIGNED else "")
    return HummingWeightSchema(
        b_dtype=name,
        bs_dtype="float8e8m0" if rows.scale.dtype == torch.uint8 else None,
        weight_scale_group_size=0 if is_whole else rows.group_size,
        has_zero_point=rows.zero is not None,
        is_fp_zero_point=rows.zero is not None and rows.zero.dtype != torch.uint8,
    )


def humming_tensors(rows: KernelRows, bias: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors of a weight by the names of humming-kernels."""
    from humming import ops

    scale = rows.scale
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    tensors: dict[str, Any] = {
        "weight": torch.cat(
            [ops.pack_weight(part.int(), rows.bits) for part in rows.codes.split(CHUNK_OUTPUTS)]
        ),
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
        """Multiply rows [rows, inputs] to [rows, outputs]."""
        return torch.cat([product(x) for product in self._products], -1)


# Shares of the range of a group's values that `round_rows` tries for 4 bits.
SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)


def round_rows(weight: Tensor, bits: int, dtype: torch.dtype) -> KernelRows:
    """Round a matrix [outputs, inputs] to codes, in groups of 32 inputs if they divide the row.

    8 bits are symmetric around zero. In 4 bits a group has a zero of its own, and of several scales
    the one with the least squared error.
    """
    (rows,) = join_alike([_round(part, bits, dtype) for part in weight.split(CHUNK_OUTPUTS)])
    return rows


def _round(weight: Tensor, bits: int, dtype: torch.dtype) -> KernelRows:
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, -1, GROUP if inputs % GROUP == 0 else inputs)
    if bits == 8:
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=MIN_SCALE).to(dtype)
        codes = (groups / scale.float()).round().clamp(-127, 127) + 128
        codes = codes.to(torch.uint8).view(outputs, inputs)
        return KernelRows(Numbers.UNSIGNED, 8, codes, scale.squeeze(-1))
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    best: list[Tensor] = []
    for share in SHARES:
        scale = (share * (high - low) / 15).clamp(min=MIN_SCALE).to(dtype)
        zero = (-share * low / scale.float()).round().clamp(0, 15)
        codes = (groups / scale.float() + zero).round().clamp(0, 15)
        error = ((codes - zero) * scale.float() - groups).square().sum(-1, keepdim=True)
        found = [error, scale.float(), zero, codes]
        if best:
            pairs = zip(found, best, strict=True)
            found = [torch.where(error < best[0], new, old) for new, old in pairs]
        best = found
    _, scale, zero, codes = best
    return KernelRows(
        Numbers.UNSIGNED,
        4,
        codes.to(torch.uint8).view(outputs, inputs),
        scale.squeeze(-1).to(dtype),
        zero.squeeze(-1).to(torch.uint8),
    )


MAX_ERROR = 0.02  # of a product against float32: it has the rounding of its inputs and outputs
TEST_ROWS = 5


@dataclass(slots=True)
class Packed:
    """What `pack_model` did.

    Attributes:
        num_packed: matrices that stay in fewer bits.
        packed_bytes: of these.
        dense_bytes: bytes of quantized matrices that became dense, by the reason.
    """

    num_packed: int = 0
    packed_bytes: int = 0
    dense_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def log(self) -> None:
        """Log it."""
        logging.info(
            "weights: %d matrices stay in fewer bits on the GPU, %d MB",
            self.num_packed, self.packed_bytes // MEGABYTE,
        )  # fmt: skip
        for reason, num_bytes in self.dense_bytes.items():
            logging.warning(
                "weights: %d MB in 16 bits, as the kernels do not multiply %s",
                num_bytes // MEGABYTE, reason,
            )  # fmt: skip


class Packer:
    """Packs the layers of a model, whose weights are in the memory of the host or of the GPU.

    Args:
        device: of the products; a CPU multiplies by torch, for tests.
        dtype: of rows, and of weights that stay dense.
        bits: to which dense matrices are rounded; None: they stay dense.
        deterministic: the numbers of a row do not depend on the number of rows.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        bits: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self._device, self._dtype, self._bits = device, dtype, bits
        self._deterministic = deterministic
        self._refused: dict[str, str] = {}  # by what was tried, of what the kernels did not compute
        self._tried: set[str] = set()
        self.packed = Packed()

    def pack(self, model: nn.Module) -> None:
        """Move a model to the device, its quantized matrices as products."""
        experts = {
            layer for m in model.modules() if isinstance(m, Experts) for layer in m.modules()
        }
        for layer in model.modules():
            if isinstance(layer, Linear | Embedding):
                self._pack_layer(layer, layer in experts)
            for values in layer.parameters(recurse=False):
                if not values.is_meta:
                    values.data = values.data.to(self._device)
        self.packed.log()

    def _pack_layer(self, layer: Linear | Embedding, is_expert: bool) -> None:
        parts: list[CodedRows | PackedRows] = [*layer.coded, *layer.blocks]
        if not parts and (self._bits is None or isinstance(layer, Embedding) or is_expert):
            return
        reason = "routers of experts" if is_expert else "embeddings"
        if isinstance(layer, Linear) and not is_expert:
            reason = self._try(layer, parts)
        layer.coded, layer.blocks = (), ()
        if not reason:
            return
        if parts:
            dense = [self._moved(part).dense().to(self._dtype) for part in parts]
            layer.weight.data = torch.cat(dense)
        self.packed.dense_bytes[reason] += layer.weight.numel() * self._dtype.itemsize

    def _moved(self, part: CodedRows | PackedRows) -> CodedRows | PackedRows:
        if isinstance(part, CodedRows):
            return part.to(self._device)
        return dataclasses.replace(part, data=part.data.to(self._device))

    def _try(self, layer: Linear, parts: Sequence[CodedRows | PackedRows]) -> str:
        """Set the product of a layer; return why not, or ""."""
        try:
            products = [self._product(rows, bias) for rows, bias in self._rows_of(layer, parts)]
        except DoesNotFit as refusal:
            return str(refusal)
        layer.product = products[0] if len(products) == 1 else JoinedProducts(products)
        layer.weight = nn.Parameter(layer.weight.data.to("meta"), requires_grad=False)
        self.packed.num_packed += 1
        self.packed.packed_bytes += sum(product.num_bytes for product in products)
        return ""

    def _rows_of(
        self, layer: Linear, parts: Sequence[CodedRows | PackedRows]
    ) -> Iterator[tuple[KernelRows, Tensor | None]]:
        """Yield the rows of each product of a layer, and its bias."""
        bias = None if layer.bias is None else layer.bias.data.to(self._device)
        if not parts:
            assert self._bits is not None
            yield round_rows(layer.weight.data.to(self._device), self._bits, self._dtype), bias
            return
        converted = []
        for part in parts:
            moved = self._moved(part)
            rows = moved.unpack() if isinstance(moved, PackedRows) else moved
            converted.append(kernel_rows(rows, self._dtype))
        first = 0
        for joined in join_alike(converted):
            last = first + len(joined.codes)
            yield joined, None if bias is None else bias[first:last].contiguous()
            first = last

    def _product(self, rows: KernelRows, bias: Tensor | None) -> "DenseProduct | PackedProduct":
        """Return the product of rows, compiled, and checked once for each shape and form.

        Raises:
            DoesNotFit: the kernels do not compute it.
        """
        if self._device.type != "cuda":
            return DenseProduct(rows, bias, self._dtype)
        key = f"{rows.numbers.value}{rows.bits} groups of {rows.group_size}"
        key += f" of {rows.codes.shape[1]} inputs, {len(rows.codes)} outputs"
        if key in self._refused:
            raise DoesNotFit(self._refused[key])
        try:
            product = PackedProduct(rows, bias, self._dtype, self._deterministic)
            if key not in self._tried:
                began = time.monotonic()
                self._check(product, rows, bias)
                self._tried.add(key)
                logging.info("compiled products of %s in %.1f s", key, time.monotonic() - began)
        except Exception as error:  # of the package, which compiles for each shape and GPU
            self._refused[key] = f"{key} ({type(error).__name__}: {str(error)[:100]})"
            raise DoesNotFit(self._refused[key]) from error
        return product

    def _check(self, product: "PackedProduct", rows: KernelRows, bias: Tensor | None) -> None:
        """Raise ValueError if a product differs from that of the values in float32."""
        generator = torch.Generator(self._device).manual_seed(0)
        shape = (TEST_ROWS, rows.codes.shape[1])
        x = torch.randn(shape, generator=generator, device=self._device).to(self._dtype)
        exact = torch.cat([x.float() @ part.dense().T for part in rows.split()], 1)
        exact = exact if bias is None else exact + bias.float()
        error = float((product(x).float() - exact).norm() / exact.norm())
        if not error <= MAX_ERROR:
            raise ValueError(f"differs by {error:.3g} from float32")


def join_alike(parts: Sequence[KernelRows]) -> list[KernelRows]:
    """Join neighbouring rows of the same form."""
    joined: list[KernelRows] = []
    for _, group in groupby(parts, _form):
        alike = list(group)
        zeros = [rows.zero for rows in alike if rows.zero is not None]
        joined.append(
            replace(
                alike[0],
                codes=torch.cat([rows.codes for rows in alike]),
                scale=torch.cat([rows.scale for rows in alike]),
                zero=torch.cat(zeros) if zeros else None,
            )
        )
    return joined


def _form(rows: KernelRows) -> tuple[object, ...]:
    order = None if rows.order is None else tuple(rows.order.tolist())
    zero = None if rows.zero is None else rows.zero.dtype
    return rows.numbers, rows.bits, rows.group_size, rows.scale.dtype, zero, order


def why_not_packed(device: torch.device, dtype: torch.dtype, num_ranks: int) -> str:
    """Return why a GPU cannot multiply quantized weights as they are stored; "" if it can.

    Args:
        device: the GPU; a CPU multiplies by torch, for tests.
        dtype: of everything that is not quantized.
        num_ranks: processes that share each layer.
    """
    if dtype == torch.float32:
        return "--dtype float32 asks for exact products"
    if num_ranks > 1:
        return "with --tp the ranks cut dense weights"
    if device.type != "cuda":
        return ""
    if find_spec("humming") is None:
        return f"that needs the package {PACKAGE}: {install_command('gpu')}"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"that needs compute capability {'.'.join(map(str, MIN_CAPABILITY))}"
    return ""
