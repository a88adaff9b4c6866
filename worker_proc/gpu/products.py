"""The products of a model: which way is the fastest for a number of rows, measured at the start.

cuBLAS, cuBLASLt and the kernel for few rows (kernels/few_rows.py) can compute a product. The kernel
also does what comes before and after it, so that a step has fewer launches.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.gpu.kernels.early import can_begin_early
from worker_proc.gpu.kernels.few_rows import (
    MAX_ROWS,
    FewRowsTile,
    kind_of_norm,
    multiply_few,
    new_arrivals,
    tiles_of,
)
from worker_proc.gpu.kernels.rows import activate_, add_and_norm, gate_up
from worker_proc.gpu.pages import num_multiprocessors, wants_plain_steps
from worker_proc.models.layers import Activation, LayerNorm, Linear, RMSNorm

ROWS = (1, 4, 8, 16, 64, 256)  # a product of more rows is cuBLAS's
DTYPES = (torch.bfloat16, torch.float16)  # of weights; float32 is multiplied by cuBLAS
MAX_ERROR = 0.02  # relative, of two results that are rounded to 8 bits
NUM_WEIGHTS = 16  # that are multiplied one after the other, so that none is in the cache
NUM_RUNS = 3
PROGRAMS_PER_PROCESSOR = 2  # that run at the same time
CUBLAS, CUBLASLT, FEW_ROWS = "cublas", "cublaslt", "few rows"

# x [rows, inputs], weight [outputs, inputs] and bias [outputs] or None to [rows, outputs], which is
# written to the last argument unless it is None.
Multiply = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]


def multiply_by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply as torch's linear does."""
    if out is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def num_programs(device: torch.device) -> int:
    """Return how many programs of a product run at the same time on a device."""
    return PROGRAMS_PER_PROCESSOR * num_multiprocessors(device)


def chooses(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of a dtype are measured on a device: not on a CPU, nor of float32."""
    return not wants_plain_steps() and device.type == "cuda" and dtype in DTYPES


class ProductWay(NamedTuple):
    """How a product is computed: by which library, or by the kernel for few rows.

    Attributes:
        name: of the library or the kernel.
        tile: of the kernel for few rows.
        begins_early: see `multiply_few`.
    """

    name: str
    tile: FewRowsTile | None = None
    begins_early: bool = False

    def __str__(self) -> str:
        tile, early = self.tile, ", early" if self.begins_early else ""
        return self.name if tile is None else f"{self.name} {tile.outputs}x{tile.inputs}{early}"


CUBLAS_WAY = ProductWay(CUBLAS)


class ProductShape(NamedTuple):
    """What products that are computed in the same way have in common."""

    outputs: int
    inputs: int
    has_bias: bool
    norm: str
    activation: Activation | None
    is_gated: bool
    adds: bool


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer with what surrounds it.

    Attributes:
        proj: the layer.
        norm: of the residual stream, before the product; None: the rows are what they are.
        activation: of the result, or None.
        is_gated: the result is activation(gate) * up.
        adds: the result is added to the residual stream in place.
    """

    proj: Linear
    norm: LayerNorm | RMSNorm | None = None
    activation: Activation | None = None
    is_gated: bool = False
    adds: bool = False

    @property
    def shape(self) -> ProductShape:
        """What decides how it is computed."""
        weight, bias = self.proj.weight, self.proj.bias
        outputs, inputs = weight.shape
        return ProductShape(
            outputs, inputs, bias is not None, kind_of_norm(self.norm), self.activation,
            self.is_gated, self.adds,
        )  # fmt: skip

    def finish(self, projected: Tensor) -> Tensor:
        """Apply the activation to x Wᵀ + b."""
        if self.activation is None:
            return projected
        if self.is_gated:
            return gate_up(projected, self.activation)
        return activate_(projected, self.activation)


class Products:
    """Computes products, each in the way that `choose` has found for its shape and rows.

    Args:
        device: where the weights are, if anything is to be chosen.
        multiply: computes a product in which nothing was chosen.
        can_choose: else `multiply` computes all of them.
        may_begin_early: kernels may begin while the one before them runs, if the device can do so.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        multiply: Multiply = multiply_by_torch,
        can_choose: bool = False,
        may_begin_early: bool = False,
    ) -> None:
        self.can_choose = can_choose
        self._multiply = multiply
        self._ways: dict[tuple[ProductShape, int], ProductWay] = {}
        self._seen: dict[ProductShape, dict[Linear, Projection]] = {}
        self._notes = False
        self._failures: list[str] = []
        self._can_begin_early = False
        if can_choose:
            assert device is not None
            self._num_programs = num_programs(device)
            self._arrivals, self._stopwatch = new_arrivals(device), Stopwatch(device)
            self._can_begin_early = may_begin_early and can_begin_early(device)

    def way_of(self, product: Projection, rows: int) -> ProductWay | None:
        """Return the way of the kernel for few rows, if it was chosen for this product."""
        if self._notes:
            self._note(product)
        if rows > MAX_ROWS or not self._ways:
            return None
        way = self._ways.get((product.shape, _class_of(rows)))
        return way if way is not None and way.tile is not None else None

    def multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Return x Wᵀ + b `[rows, outputs]`, where nothing was chosen; in `out` if there is one."""
        return self._multiply(x, weight, bias, out)

    def project(self, x: Tensor, product: Projection) -> Tensor:
        """Return the result of a product without its norm and its addition, by a library."""
        proj, rows = product.proj, len(x)
        if self._ways and rows <= ROWS[-1]:
            way = self._ways.get((product.shape, _class_of(rows)))
            if way is not None and way.name == CUBLASLT:
                return product.finish(multiply_by_cublaslt(x, proj.weight, proj.bias))
        return product.finish(self._multiply(x, proj.weight, proj.bias, None))

    def project_few(
        self,
        way: ProductWay,
        x: Tensor,
        product: Projection,
        residual: Tensor | None = None,
        factor: float = 1.0,
    ) -> Tensor:
        """Return the result of a product by the kernel for few rows, see `multiply_few`."""
        assert way.tile is not None
        return multiply_few(
            x, product.proj.weight, product.proj.bias, way.tile, self._num_programs,
            self._arrivals, product.norm, product.activation, product.is_gated, residual, factor,
            way.begins_early,
        )  # fmt: skip

    def choose(self, run: Callable[[], object]) -> None:
        """Choose a way for every product that `run` computes."""
        if not self.can_choose:
            return
        began = time.monotonic()
        self._notes = True
        run()
        self._notes = False
        chosen: list[str] = []
        for shape, by_layer in self._seen.items():
            products = list(by_layer.values())[:NUM_WEIGHTS]
            for rows in ROWS:
                found = self.fastest(products, rows)
                if found is not None:
                    self._ways[shape, rows] = found.way
                    chosen.append(f"{rows} x {shape.inputs} to {shape.outputs} by {found}")
        self._seen.clear()
        logging.info("measured products in %.1f s; faster than cuBLAS: %s",
                     time.monotonic() - began, ", ".join(chosen) or "none")  # fmt: skip
        if self._failures:
            logging.warning("%d ways to multiply failed, and others compute instead; the first: %s",
                            len(self._failures), self._failures[0])  # fmt: skip

    def fastest(self, products: Sequence[Projection], rows: int) -> "Fastest | None":
        """Return the fastest way for products of one shape; None: cuBLAS."""
        ways = list(ways_of(products[0], rows))
        if len(ways) == 1:
            return None
        times = {way: self._seconds_of(way, products, rows) for way in ways}
        tiled = [way for way in ways if way.tile is not None]
        if self._can_begin_early and tiled:
            early = min(tiled, key=lambda way: times[way])._replace(begins_early=True)
            times[early] = self._seconds_of(early, products, rows)
        best = min(times, key=lambda way: times[way])
        return None if best == CUBLAS_WAY else Fastest(best, times[best], times[CUBLAS_WAY])

    def _seconds_of(self, way: ProductWay, products: Sequence[Projection], rows: int) -> float:
        """Return the seconds of a product in one way; infinity if that fails or gives others."""
        try:
            compute, result = self.try_way(way, products[0], rows)
            if way != CUBLAS_WAY:
                expected = self.try_way(CUBLAS_WAY, products[0], rows).result
                if not (result - expected).norm() <= MAX_ERROR * expected.norm():
                    raise ArithmeticError("its result differs from that of cuBLAS")
            return self._stopwatch.seconds_of(compute, products)
        except Exception as error:  # of the compiler or the driver: another way computes it
            reason = f"{type(error).__name__}: {str(error).split(chr(10))[0][:200]}"
            self._failures.append(f"{rows} rows by {way}, {products[0].shape}: {reason}")
            return float("inf")

    def try_way(self, way: ProductWay, product: Projection, rows: int) -> "Tried":
        """Return what computes products of a shape in one way, and a first result in float32."""
        x, residual = _inputs_of(product, rows)
        compute = partial(self._compute, way, x, residual)
        return Tried(compute, compute(product).float())

    def _note(self, product: Projection) -> None:
        """Note a product that is to be measured, and what it is behind a norm by itself."""
        self._seen.setdefault(product.shape, {})[product.proj] = product
        if product.norm is not None:
            self._note(replace(product, norm=None))

    def _compute(self, way: ProductWay, x: Tensor, residual: Tensor, product: Projection) -> Tensor:
        """Compute a product in one way, with all launches that it needs or saves."""
        if way.tile is not None:
            return self.project_few(way, x, product, residual if product.adds else None)
        rows = x if product.norm is None else add_and_norm(x, None, product.norm)
        multiply = multiply_by_cublaslt if way.name == CUBLASLT else F.linear
        return product.finish(multiply(rows, product.proj.weight, product.proj.bias))


class Tried(NamedTuple):
    """What computes products of a shape in one way, and its first result in float32."""

    compute: Callable[[Projection], Tensor]
    result: Tensor


class Fastest(NamedTuple):
    """A way that is faster than cuBLAS, and the seconds of a product by either."""

    way: ProductWay
    seconds: float
    of_cublas: float

    def __str__(self) -> str:
        return f"{self.way} ({1e6 * self.seconds:.1f} us, not {1e6 * self.of_cublas:.1f})"


def ways_of(product: Projection, rows: int) -> Iterator[ProductWay]:
    """Yield the ways that may compute a product of so many rows, cuBLAS first.

    A norm within the product pays off for one row; more rows would be read in float32 as often as
    there are programs.
    """
    yield CUBLAS_WAY
    if product.norm is None and product.proj.weight.is_cuda:
        yield ProductWay(CUBLASLT)
    if product.proj.weight.is_contiguous() and (product.norm is None or rows == 1):
        yield from (ProductWay(FEW_ROWS, tile) for tile in tiles_of(rows, product.is_gated))


def _class_of(rows: int) -> int:
    """Return the number of rows that was measured for so many."""
    return next(most for most in ROWS if rows <= most)


def _inputs_of(product: Projection, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows for a product, and a residual stream."""
    weight = product.proj.weight
    outputs, inputs = weight.shape
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(rows, inputs, device=weight.device, generator=generator)
    residual = torch.zeros(rows, outputs, device=weight.device)
    return x if product.norm is not None else x.to(weight.dtype), residual


def multiply_by_cublaslt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply as torch's linear does, by cuBLASLt; later products are computed as before."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return F.linear(x, weight, bias)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class Stopwatch:
    """Times products on a device; on a GPU as kernels of a graph, as steps are."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        if self._is_gpu:
            self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
            # A pool ends with its last graph, and cannot be used again: the first one stays.
            self._first: torch.cuda.CUDAGraph | None = None

    def seconds_of(
        self, compute: Callable[[Projection], Tensor], products: Sequence[Projection]
    ) -> float:
        """Return the seconds of a product, computed after others of its shape."""

        def run() -> None:
            for product in products:
                compute(product)

        run()
        if not self._is_gpu:
            began = time.perf_counter()
            run()
            return (time.perf_counter() - began) / len(products)
        graph = self._captured(run)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(NUM_RUNS):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)) / 1000)
        return min(times) / len(products)

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a graph; torch's own way also frees all memory that torch keeps, each time."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        self._first = self._first or graph
        return graph
