"""Multiply by the quantized weights of experts on a GPU, by the grouped kernels of humming-kernels.

The experts of one projection are one stack of packed weights. `ExpertPacker` makes it of the rows
of all experts, one expert at a time, and gives a layer two such products.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worker_proc.gpu.quantized import (
    INPUT_MULTIPLE,
    MAX_ERROR,
    MEGABYTE,
    NUM_LOCKS,
    OUTPUT_MULTIPLE,
    DoesNotFit,
    KernelRows,
    Numbers,
    humming_schema,
    humming_tensors,
    join_alike,
    kernel_rows,
    round_rows,
)
from worker_proc.models.layers import ExpertProduct, Experts, Linear, gate_up_rows
from worker_proc.models.quantized_weights import CodedRows, CodeKind

TEST_ROWS = (3, 40, 1000)  # of three experts: kernels differ by the number of rows
NUM_TESTED = 3  # experts

# Returns the rows of an expert by its number, on the device of the products.
RowsOf = Callable[[int], KernelRows]


class DenseExperts:
    """The product of experts by torch, for tests without a GPU: the same numbers, in `dtype`."""

    def __init__(
        self, rows_of: RowsOf, count: int, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        rows = [rows_of(number) for number in range(count)]
        self.orders = stacked_orders(rows)
        self.num_bytes = sum(one.num_bytes for one in rows)
        self._weights = [replace(one, order=None).dense().to(dtype) for one in rows]
        self._bias = bias

    def __call__(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Multiply rows [rows, inputs], sorted by expert, to [rows, outputs]."""
        parts = rows.split(starts.diff().tolist())
        return torch.cat([
            F.linear(part, weight, None if self._bias is None else self._bias[number])
            for number, (part, weight) in enumerate(zip(parts, self._weights, strict=True))
        ])  # fmt: skip


class PackedExperts:
    """The product of experts by humming-kernels, which compile at the first call."""

    def __init__(
        self,
        rows_of: RowsOf,
        count: int,
        bias: Tensor | None,
        dtype: torch.dtype,
        deterministic: bool = False,
    ) -> None:
        """Pack the rows of one expert after the other.

        Args:
            rows_of: returns the rows of an expert, all of one form, on a GPU.
            count: experts.
            bias: [experts, outputs], or None.
            dtype: of inputs and outputs, bfloat16 or float16.
            deterministic: the numbers of a row do not depend on the number of rows.
        """
        from humming.transform import prepare_layer_config, transform_humming_tensors

        first = rows_of(0)
        device, (outputs, inputs) = first.codes.device, first.codes.shape
        of_one, self._config = (
            prepare_layer_config(
                outputs,
                inputs,
                humming_schema(first),
                num_experts=num_experts,
                pad_n_to_multiple=OUTPUT_MULTIPLE,
                pad_k_to_multiple=INPUT_MULTIPLE,
                has_bias=bias is not None,
                torch_dtype=dtype,
                device=device,
            )
            for num_experts in (None, count)
        )
        self._tensors: dict[str, Tensor] = {}
        orders = []
        for number in range(count):
            rows = first if number == 0 else rows_of(number)
            orders.append(replace(rows, codes=rows.codes[:0], scale=rows.scale[:0], zero=None))
            tensors = humming_tensors(rows, None if bias is None else bias[number])
            packed = transform_humming_tensors(of_one, tensors)
            if number == 0:
                self._tensors = {
                    name: part.new_empty(count, *part.shape) for name, part in packed.items()
                }
            for name, part in packed.items():
                self._tensors[name][number] = part
        self.orders = stacked_orders(orders)
        self._locks = torch.zeros(NUM_LOCKS, dtype=torch.int32, device=device)
        kind = {"gemm_type": "grouped_contiguous"}
        self._compute = json.dumps(kind | ({"use_batch_invariant": True} if deterministic else {}))

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(part.numel() * part.element_size() for part in self._tensors.values())

    def __call__(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Multiply rows [rows, inputs], sorted by expert, to [rows, outputs]."""
        from humming.forward import humming_forward

        product: Tensor = humming_forward(
            self._config,
            rows,
            expert_layout=starts,
            locks=self._locks,
            compute_config=self._compute,
            **self._tensors,
        )
        return product


def stacked_orders(rows: Sequence[KernelRows]) -> Tensor | None:
    """Return the orders [experts, inputs] int32 of the inputs of all experts, if one has one."""
    if all(one.order is None for one in rows):
        return None
    inputs = rows[0].codes.shape[1]
    in_order = torch.arange(inputs, device=rows[0].codes.device)
    orders = [in_order if one.order is None else one.order.to(in_order.device) for one in rows]
    return torch.stack(orders).int()


class ExpertPacker:
    """Packs the experts of a model, whose weights are in the memory of the host or of the GPU.

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

    def pack(self, model: nn.Module) -> int:
        """Give each layer of experts its products; return the bytes of all.

        A layer that the kernels do not multiply becomes dense on the device; a warning says why.
        """
        num_layers, num_bytes, dense = 0, 0, defaultdict[str, int](int)
        for layer in model.modules():
            if not isinstance(layer, Experts):
                continue
            linears = [*_linears(layer.gate_up), *_linears(layer.down)]
            if self._bits is None and not any(linear.coded for linear in linears):
                continue
            try:
                num_bytes += self._pack_layer(layer)
                num_layers += 1
            except DoesNotFit as refusal:
                dense[str(refusal)] += self._make_dense(linears)
        if num_layers:
            logging.info(
                "weights: the experts of %d layers stay in fewer bits on the GPU, %d MB",
                num_layers, num_bytes // MEGABYTE,
            )  # fmt: skip
        for reason, size in dense.items():
            logging.warning(
                "weights: %d MB of experts in 16 bits, as the kernels do not multiply %s",
                size // MEGABYTE, reason,
            )  # fmt: skip
        return num_bytes

    def _pack_layer(self, layer: Experts) -> int:
        """Set the products of a layer; return their bytes. Raises DoesNotFit."""
        gate_up, down = list(_linears(layer.gate_up)), list(_linears(layer.down))
        # The inputs of `down` are the outputs of `gate_up`, which can be in any order.
        orders = [linear.coded[0].order if linear.coded else None for linear in down]
        gate_up_bias, down_bias = _stacked_bias(gate_up), _stacked_bias(down)
        if gate_up_bias is not None:
            gate_up_bias = torch.stack([
                bias if order is None else bias[gate_up_rows(order)]
                for bias, order in zip(gate_up_bias, orders, strict=True)
            ])  # fmt: skip

        rows_of_gate_up, rows_of_down = self._rows_of(gate_up), self._rows_of(down)

        def first_rows(number: int) -> KernelRows:
            rows, order = rows_of_gate_up(number), orders[number]
            return rows if order is None else _take(rows, gate_up_rows(order))

        def second_rows(number: int) -> KernelRows:
            return replace(rows_of_down(number), order=None)

        first = self._product(first_rows, len(gate_up), gate_up_bias)
        second = self._product(second_rows, len(down), down_bias)
        layer.products, layer.inner_orders = (first, second), tuple(orders)
        for linear in (*gate_up, *down):
            linear.coded = ()
            linear.weight = nn.Parameter(linear.weight.data.to("meta"), requires_grad=False)
            if linear.bias is not None:
                linear.bias = nn.Parameter(linear.bias.data.to("meta"), requires_grad=False)
        return first.num_bytes + second.num_bytes

    def _make_dense(self, linears: Iterable[Linear]) -> int:
        """Move weights to the device, dense; return their bytes."""
        num_bytes = 0
        for linear in linears:
            if linear.coded:
                parts = [rows.to(self._device).dense().to(self._dtype) for rows in linear.coded]
                linear.weight.data = torch.cat(parts)
                linear.coded = ()
            linear.weight.data = linear.weight.data.to(self._device)
            num_bytes += linear.weight.numel() * self._dtype.itemsize
        return num_bytes

    def _rows_of(self, linears: Sequence[Linear]) -> RowsOf:
        """Return a function from the number of an expert to its rows. Raises DoesNotFit."""
        if self._bits is not None and not linears[0].coded:
            bits = self._bits
            return lambda number: round_rows(
                linears[number].weight.data.to(self._device), bits, self._dtype
            )
        parts = [rows for linear in linears for rows in linear.coded]
        if not all(linear.coded for linear in linears):
            raise DoesNotFit("experts of which some are quantized and others are not")
        zero_dtype = _zero_dtype(parts, self._dtype)

        def rows_of(number: int) -> KernelRows:
            converted = [
                _with_zero(kernel_rows(rows.to(self._device), self._dtype), zero_dtype)
                for rows in linears[number].coded
            ]
            joined = join_alike(converted)
            if len(joined) > 1:
                raise DoesNotFit("experts whose gate and up projections differ in form")
            return joined[0]

        first = parts[0]
        if any((rows.kind, rows.group_size) != (first.kind, first.group_size) for rows in parts):
            raise DoesNotFit("experts of several forms")
        return rows_of

    def _product(
        self, rows_of: RowsOf, count: int, bias: Tensor | None
    ) -> "DenseExperts | PackedExperts":
        """Return a product, compiled, and checked once for each shape and form.

        Raises:
            DoesNotFit: the kernels do not compute it.
        """
        bias = None if bias is None else bias.to(self._device)
        if self._device.type != "cuda":
            return DenseExperts(rows_of, count, bias, self._dtype)
        first = rows_of(0)
        zero = "" if first.zero is None else f", zeros in {first.zero.dtype}"
        key = f"{first.numbers.value}{first.bits} groups of {first.group_size}{zero} of"
        key += f" {first.codes.shape[1]} inputs, {len(first.codes)} outputs, {count} experts"
        if key in self._refused:
            raise DoesNotFit(self._refused[key])
        try:
            if first.scale.dtype == torch.uint8 and self._dtype == torch.float16:
                raise ValueError("exponents of 8 bits need --dtype bfloat16")
            product = PackedExperts(rows_of, count, bias, self._dtype, self._deterministic)
            if key not in self._tried:
                began = time.monotonic()
                check_experts(product, rows_of, count, bias, self._dtype)
                self._tried.add(key)
                logging.info("compiled products of %s in %.1f s", key, time.monotonic() - began)
        except DoesNotFit:
            raise
        except Exception as error:  # of the package, which compiles for each shape and GPU
            self._refused[key] = f"{key} ({type(error).__name__}: {str(error)[:100]})"
            raise DoesNotFit(self._refused[key]) from error
        return product


def check_experts(
    product: ExpertProduct, rows_of: RowsOf, count: int, bias: Tensor | None, dtype: torch.dtype
) -> float:
    """Return the largest error of a product, of one that is computed in float32.

    Raises:
        ValueError: it exceeds MAX_ERROR.
    """
    tested = sorted({0, count // 2, count - 1})[:NUM_TESTED]
    dense = {number: replace(rows_of(number), order=None).dense() for number in tested}
    weight = dense[0]
    generator = torch.Generator(weight.device).manual_seed(0)
    errors = []
    for num_rows in TEST_ROWS:
        sizes = torch.zeros(count, dtype=torch.int64)
        sizes[tested] = num_rows // len(tested)
        sizes[tested[-1]] += num_rows - int(sizes.sum())
        starts = F.pad(sizes.cumsum(0), (1, 0)).int().to(weight.device)
        x = torch.randn(num_rows, weight.shape[1], generator=generator, device=weight.device)
        x = x.to(dtype)
        parts = [
            F.linear(part.float(), dense[number], None if bias is None else bias[number].float())
            for number, part in enumerate(x.split(sizes.tolist()))
            if len(part)
        ]
        exact = torch.cat(parts)
        errors.append(float((product(x, starts).float() - exact).norm() / exact.norm()))
    if not all(error <= MAX_ERROR for error in errors):
        raise ValueError(f"differs by {max(errors):.3g} from float32")
    return max(errors)


def _linears(layers: Iterable[nn.Module]) -> Iterable[Linear]:
    return cast(Iterable[Linear], layers)


def _stacked_bias(linears: Sequence[Linear]) -> Tensor | None:
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    return torch.stack(biases) if biases else None


def _take(rows: KernelRows, index: Tensor) -> KernelRows:
    index = index.to(rows.codes.device)
    zero = None if rows.zero is None else rows.zero[index]
    return replace(rows, codes=rows.codes[index], scale=rows.scale[index], zero=zero)


def _zero_dtype(parts: Sequence[CodedRows], dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which the zeros of all experts fit; None: all are the middle code."""
    bits = 4 if parts[0].kind is CodeKind.INT4 else 8
    zeros = [rows.zero for rows in parts if rows.zero is not None]
    if all(bool((zero == 1 << bits - 1).all()) for zero in zeros):
        return None
    return dtype if any(int(zero.max()) >= 1 << bits for zero in zeros) else torch.uint8


def _with_zero(rows: KernelRows, dtype: torch.dtype | None) -> KernelRows:
    """Return the same values with zeros of a dtype, as other experts need them."""
    if dtype is None:
        return rows
    middle = 1 << rows.bits - 1
    zero = torch.full_like(rows.scale, middle) if rows.zero is None else rows.zero
    assert rows.numbers is Numbers.UNSIGNED
    return replace(rows, zero=zero.to(dtype))
