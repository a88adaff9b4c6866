"""The packed experts of a GPU have the products of their values in float32.

    python -m pytest -s tests/gpu/test_packed_experts.py

The first run compiles some 40 kernels. Prints the error of each form and number of tokens.
"""

import pytest
import torch
from torch import Tensor, nn

from worker_proc.gpu.kernels.experts import gather_rows, grouped_experts, route_pairs
from worker_proc.gpu.quantized import KernelRows, Numbers, round_rows
from worker_proc.gpu.quantized_experts import DenseExperts, ExpertPacker, PackedExperts, RowsOf
from worker_proc.models.layers import Experts

pytest.importorskip("humming", reason="humming-kernels is not installed")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

GPU, NUM_EXPERTS, NUM_CHOSEN, WIDTH, GROUP = torch.device("cuda"), 4, 2, 256, 32
TOKENS, MAX_ERROR = (1, 7, 300), 0.01  # of numbers that are rounded to bfloat16


def draw(*size: int, seed: int, high: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if high:
        return torch.randint(0, high, size, dtype=torch.uint8, generator=generator).to(GPU)
    return torch.randn(*size, generator=generator).to(GPU)


def uint4_rows(number: int) -> KernelRows:
    return round_rows(draw(WIDTH, WIDTH, seed=number), 4, torch.bfloat16)


def mxfp4_rows(number: int) -> KernelRows:
    codes = draw(WIDTH, WIDTH, seed=number, high=16)
    exponents = 118 + draw(WIDTH, WIDTH // GROUP, seed=10 + number, high=6)
    return KernelRows(Numbers.E2M1, 4, codes, exponents)


def e4m3_rows(number: int) -> KernelRows:
    codes = draw(WIDTH, WIDTH, seed=number).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = draw(WIDTH, 1, seed=10 + number).abs().add(0.1).bfloat16()
    return KernelRows(Numbers.E4M3, 8, codes, scale)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("rows_of", [uint4_rows, mxfp4_rows, e4m3_rows])
def test_each_form_has_the_products_of_float32(rows_of: RowsOf, is_captured: bool) -> None:
    bias = draw(NUM_EXPERTS, WIDTH, seed=20).bfloat16() if rows_of is mxfp4_rows else None
    packed = PackedExperts(rows_of, NUM_EXPERTS, bias, torch.bfloat16)
    exact = DenseExperts(
        rows_of, NUM_EXPERTS, None if bias is None else bias.float(), torch.float32
    )
    for tokens in TOKENS:
        routing = route_pairs(draw(tokens, NUM_EXPERTS, seed=tokens), NUM_CHOSEN, True)
        rows = gather_rows(draw(tokens, WIDTH, seed=30).bfloat16(), routing)
        outputs = packed(rows, routing.starts)
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = packed(rows, routing.starts)
            graph.replay()
            graph.replay()
        expected = exact(rows.float(), routing.starts)
        error = float((outputs.float() - expected).norm() / expected.norm())
        form = rows_of(0).numbers.value
        print(f"{form}, {tokens} tokens, graph {is_captured}: error {error:.5f}")
        assert error <= MAX_ERROR


def test_a_layer_whose_experts_are_rounded_gives_nearly_its_dense_outputs() -> None:
    layer = Experts(WIDTH, WIDTH, NUM_EXPERTS, NUM_CHOSEN).to(GPU, torch.bfloat16)
    for seed, weight in enumerate(layer.parameters()):
        weight.data.copy_(draw(*weight.shape, seed=seed) / 16)
    model = nn.ModuleList([layer])
    x = {tokens: draw(tokens, WIDTH, seed=tokens).bfloat16() for tokens in TOKENS}
    scores = {tokens: draw(tokens, NUM_EXPERTS, seed=50 + tokens) for tokens in TOKENS}

    def outputs() -> list[Tensor]:
        (one,) = grouped_experts(model).values()  # type: ignore[arg-type]
        return [one.output(x[tokens], scores[tokens]).float() for tokens in TOKENS]

    dense = outputs()
    ExpertPacker(GPU, torch.bfloat16, bits=4).pack(model)
    assert layer.products is not None, "the layer became dense"
    for tokens, before, after in zip(TOKENS, dense, outputs(), strict=True):
        error = float((after - before).norm() / before.norm())
        print(f"layer rounded to 4 bits, {tokens} tokens: error {error:.4f}")
        assert error <= 0.2  # of the rounding of both projections
