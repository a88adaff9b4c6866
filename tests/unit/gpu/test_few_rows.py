"""The kernel for few rows against plain torch, and the choice of a way to multiply."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from worker_proc.gpu.kernels.early import can_begin_early
from worker_proc.gpu.kernels.few_rows import FewRowsTile, multiply_few, new_arrivals, tiles_of
from worker_proc.gpu.kernels.rows import add_and_norm
from worker_proc.gpu.products import Products, ProductWay, Projection, multiply_by_cublaslt
from worker_proc.models.layers import (
    Activation,
    LayerNorm,
    Linear,
    RMSNorm,
    activate,
    gate_up,
)

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT32: 1e-5, BFLOAT16: 1e-2}
ROW = FewRowsTile(1, 4, 64, stages=1, warps=4)
ROWS = FewRowsTile(16, 32, 32, stages=2, warps=4)
MANY_ROWS = FewRowsTile(64, 32, 32, stages=2, warps=4)


def draw(*size: int, dtype: torch.dtype = FLOAT32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    difference = (ours.float() - theirs.float()).norm() / theirs.float().norm()
    return bool(difference <= TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 100, 9), (2, 96, 70), (7, 33, 33),
                                                         (16, 130, 40), (37, 80, 50)])  # fmt: skip
@pytest.mark.parametrize("num_programs", [1, 12])
@pytest.mark.parametrize("has_bias", [True, False])
def test_few_rows_are_multiplied_as_by_torch(
    rows: int, inputs: int, outputs: int, num_programs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1)
    bias, arrivals = draw(outputs, dtype=dtype) if has_bias else None, new_arrivals(DEVICE)
    tile = next(tile for tile in (ROW, ROWS, MANY_ROWS) if rows <= tile.rows)
    ours = multiply_few(x, weight, bias, tile, num_programs, arrivals)
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert ours.dtype == dtype and close(ours, exact, dtype)
    assert arrivals.eq(0).all()
    assert multiply_few(x, weight, bias, tile, num_programs, arrivals).equal(ours)


@pytest.mark.parametrize("num_programs", [1, 12])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_product_is_added_to_the_residual_stream(rows: int, num_programs: int) -> None:
    x, weight, bias = draw(rows, 90), draw(41, 90, seed=1), draw(41)
    residual = draw(rows, 41, seed=2)
    expected = residual + 0.3 * F.linear(x, weight, bias)
    tile = ROW if rows == 1 else ROWS
    returned = multiply_few(x, weight, bias, tile, num_programs, new_arrivals(DEVICE),
                            residual=residual, factor=0.3)  # fmt: skip
    assert returned is residual and close(residual, expected, FLOAT32)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("is_gated", [True, False])
def test_activations_and_gates_follow_the_product(
    activation: Activation, rows: int, is_gated: bool
) -> None:
    if activation is Activation.CLAMPED_SWIGLU and not is_gated:
        return
    x, weight, bias = 4 * draw(rows, 50), draw(44, 50, seed=1), draw(44)
    projected = F.linear(x, weight, bias)
    expected = (gate_up if is_gated else activate)(activation, projected)
    for num_programs in (1, 12):
        ours = multiply_few(x, weight, bias, ROW if rows == 1 else ROWS, num_programs,
                            new_arrivals(DEVICE), activation=activation,
                            is_gated=is_gated)  # fmt: skip
        assert close(ours, expected, FLOAT32)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize(("dtype", "width"), product(TOLERANCE, [64, 150]), ids=str)
def test_one_row_is_normalized_before_the_product(
    kind: type, width: int, dtype: torch.dtype
) -> None:
    norm = kind(width, 1e-5).to(DEVICE, dtype)
    norm.weight.copy_(draw(width))
    x, weight = 3 + 5 * draw(1, width), draw(24, width, dtype=dtype, seed=1)
    gain = norm.weight.float()
    if isinstance(norm, RMSNorm):
        norm.offset = 1.0
        normed = F.rms_norm(x, (width,), gain + 1.0, 1e-5)
    else:
        norm.bias.copy_(draw(width, seed=3))
        normed = F.layer_norm(x, (width,), gain, norm.bias.float(), 1e-5)
    before = x.clone()
    ours = multiply_few(x, weight, None, ROW, 1, new_arrivals(DEVICE), norm)
    assert ours.dtype == dtype and close(ours, normed @ weight.float().T, dtype)
    assert x.equal(before)


@pytest.mark.skipif(not can_begin_early(DEVICE), reason="needs compute capability 9.0")
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_a_kernel_that_begins_early_reads_what_the_one_before_has_written(rows: int) -> None:
    """A chain of products in a graph, each of which reads the result of the one before."""
    weights = [draw(4096, 4096, dtype=BFLOAT16, seed=seed) / 64 for seed in range(4)]
    arrivals, norm = new_arrivals(DEVICE), RMSNorm(4096, 1e-5).to(DEVICE, BFLOAT16)
    norm.weight.fill_(1.0)
    tile, first = tiles_of(rows, False)[0], draw(rows, 4096)

    def chain(begins_early: bool) -> Tensor:
        residual = first.clone()
        for step in range(12):
            x = residual if rows == 1 else add_and_norm(residual, None, norm)
            inner = multiply_few(
                x, weights[step % 4], None, tile, 264, arrivals, norm if rows == 1 else None,
                begins_early=begins_early,
            )  # fmt: skip
            multiply_few(
                inner, weights[(step + 1) % 4], None, tile, 264, arrivals, residual=residual,
                begins_early=begins_early,
            )  # fmt: skip
        return residual

    expected = chain(False)
    assert chain(True).equal(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(True)
    for _ in range(5):
        result.zero_()
        graph.replay()
        assert result.equal(expected)


def test_tiles_hold_the_rows_and_share_a_gate() -> None:
    for rows, most in ((1, 1), (2, 16), (16, 16), (17, 64), (64, 64)):
        assert {tile.rows for tile in tiles_of(rows, rows == 1)} == {most}
    assert not tiles_of(65, False)
    halves = [tile._replace(outputs=tile.outputs // 2) for tile in tiles_of(9, False)]
    assert tiles_of(9, True) == halves


class Measured(Products):
    """Products whose times are given by the name and the outputs of a way's tile.

    Attributes:
        early: the time of a kernel that begins early.
    """

    def __init__(self, times: dict[tuple[str, int], float]) -> None:
        super().__init__(DEVICE, can_choose=True)
        self._stopwatch = self  # type: ignore[assignment]
        self._times, self.early = times, 0.0

    def project_few(self, way: ProductWay, *args: Any) -> Tensor:
        return super().project_few(way._replace(begins_early=False), *args)

    def seconds_of(self, compute: Any, products: object) -> float:
        """Stand in for a Stopwatch."""
        (way, *_) = compute.args
        if way.begins_early:
            return self.early
        return self._times[way.name, 0 if way.tile is None else way.tile.outputs]


def linear(inputs: int, outputs: int) -> Linear:
    proj = Linear(inputs, outputs).to(DEVICE, BFLOAT16)
    proj.weight.copy_(draw(outputs, inputs))
    return proj


USUAL = {("cublas", 0): 5.0, ("cublaslt", 0): 6.0, ("few rows", 64): 7.0, ("few rows", 128): 7.0}


def test_the_fastest_way_is_chosen_for_each_number_of_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = USUAL | {("few rows", 4): 4.0, ("few rows", 8): 3.0, ("few rows", 16): 9.0}
    products, product = Measured(times), Projection(linear(40, 24), adds=True)
    assert products.way_of(product, 1) is None
    with caplog.at_level("INFO"):
        products.choose(lambda: products.way_of(product, 1))
    way = products.way_of(product, 1)
    assert way is not None and str(way) == "few rows 8x512"
    assert products.way_of(product, 2) is None and products.way_of(product, 65) is None
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "1 x 40 to 24 by few rows 8x512 (3000000.0 us, not 5000000.0)" in caplog.text


def test_each_layer_is_measured_once_with_its_norm_and_behind_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight that is multiplied twice in a row is in the cache the second time."""
    products, norm = Products(DEVICE, can_choose=True), RMSNorm(40, 1e-5)
    layers = [Projection(linear(40, 24), norm) for _ in range(2)]
    measured: dict[str, list[Linear]] = {}

    def fastest(products: Sequence[Projection], rows: int) -> None:
        measured[products[0].shape.norm] = [one.proj for one in products]

    def run() -> None:
        for layer in layers:
            products.way_of(layer, 1)
            products.way_of(replace(layer, norm=None), 1)

    monkeypatch.setattr(products, "fastest", fastest)
    products.choose(run)
    assert measured == {"rms": [one.proj for one in layers], "": [one.proj for one in layers]}


@pytest.mark.parametrize("is_wrong", [True, False])
def test_ways_that_fail_or_are_wrong_leave_their_products_to_cublas(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        if is_wrong:
            return torch.zeros(len(x), len(weight), device=x.device)
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr("worker_proc.gpu.products.multiply_few", fail)
    times = USUAL | dict.fromkeys((("few rows", 4), ("few rows", 8), ("few rows", 16)), 1.0)
    products, product = Measured(times), Projection(linear(40, 24))
    with caplog.at_level("INFO"):
        products.choose(lambda: products.way_of(product, 1))
    assert all(products.way_of(product, rows) is None for rows in range(1, 65))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert ("differs from that of cuBLAS" if is_wrong else "shared memory") in caplog.text
    x = draw(2, 40, dtype=BFLOAT16)
    assert products.project(x, product).equal(F.linear(x, product.proj.weight))


@pytest.mark.parametrize(("early", "is_early"), [(2.0, True), (9.0, False)])
def test_the_fastest_kernel_begins_early_if_that_is_faster(early: float, is_early: bool) -> None:
    times = USUAL | {("few rows", 4): 4.0, ("few rows", 8): 3.0, ("few rows", 16): 9.0}
    products, product = Measured(times), Projection(linear(40, 24))
    products._can_begin_early, products.early = True, early
    found = products.fastest([product], 1)
    assert found is not None and found.way.begins_early is is_early
    assert found.way.tile is not None and found.way.tile.outputs == 8


def test_cublaslt_computes_one_product_and_not_those_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = ["cublas"]

    def preferred(library: str | None = None) -> str:
        chosen.extend([library] if library else [])
        return chosen[-1]

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    x, weight = draw(3, 40, dtype=BFLOAT16), draw(24, 40, dtype=BFLOAT16)
    assert close(multiply_by_cublaslt(x, weight, None), F.linear(x, weight), BFLOAT16)
    assert chosen == ["cublas", "cublaslt", "cublas"]


def test_products_are_measured_by_a_clock() -> None:
    """As at the start of a worker on a GPU, where the times decide."""
    products, product = Products(DEVICE, can_choose=True), Projection(linear(40, 24))
    products.choose(lambda: products.way_of(product, 1))
    x = draw(1, 40, dtype=BFLOAT16)
    way = products.way_of(product, 1)
    projected = products.project_few(way, x, product) if way else products.project(x, product)
    assert close(projected, F.linear(x, product.proj.weight), BFLOAT16)
