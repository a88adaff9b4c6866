"""A mixture of experts on a GPU against plain torch."""

import pytest
import torch
from torch import Tensor, nn

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from worker_proc.gpu.kernels.experts import (
    BLOCK_ROWS,
    ExpertRouting,
    GroupedExperts,
    gather_rows,
    grouped_experts,
    route_pairs,
)
from worker_proc.models.layers import Activation, Experts, Linear, gate_up, route

HIDDEN, INNER, NUM_EXPERTS = 40, 24, 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(*size: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(DEVICE, dtype)


def grouped(num_chosen: int, bias: bool, dtype: torch.dtype, **options: object) -> GroupedExperts:
    model = nn.Module()
    model.experts = Experts(
        HIDDEN, INNER, NUM_EXPERTS, num_chosen, bias=bias, **options  # type: ignore[arg-type]
    ).to(DEVICE, dtype)  # fmt: skip
    for seed, parameter in enumerate(model.parameters()):
        parameter.copy_(0.3 * draw(*parameter.shape, dtype=dtype, seed=seed))
    (layer,) = grouped_experts(model).values()  # type: ignore[arg-type]
    return layer


def expected(experts: Experts, x: Tensor, scores: Tensor) -> Tensor:
    """Token by token, in float32."""
    weights, chosen = route(experts, scores)
    rows = []
    for token, row in enumerate(x.float()):
        total = torch.zeros(HIDDEN, device=DEVICE)
        for weight, number in zip(weights[token], chosen[token].tolist(), strict=True):
            inner = gate_up(experts.activation, _project(experts.gate_up[number], row[None]))
            total += weight * _project(experts.down[number], inner)[0]
        rows.append(total)
    return torch.stack(rows)


def _project(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, Linear)
    bias = None if layer.bias is None else layer.bias.float()
    return torch.nn.functional.linear(x, layer.weight.float(), bias)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("tokens", "num_chosen", "bias", "options"),
    [
        (1, 2, False, {}),
        (7, 1, True, {"renormalize": False}),
        (50, 3, True, {"activation": Activation.CLAMPED_SWIGLU}),
    ],
)
def test_the_outputs_of_each_tokens_experts_are_added(
    tokens: int, num_chosen: int, bias: bool, options: dict[str, object], dtype: torch.dtype
) -> None:
    layer = grouped(num_chosen, bias, dtype, **options)
    x = draw(tokens, HIDDEN, dtype=dtype, seed=50)
    scores = draw(tokens, NUM_EXPERTS, dtype=dtype, seed=51)
    output, reference = layer.output(x, scores), expected(layer.experts, x, scores)
    assert output.dtype == dtype
    assert (output.float() - reference).norm() <= TOLERANCE[dtype] * reference.norm()


def test_a_tokens_output_does_not_depend_on_the_others() -> None:
    layer = grouped(2, True, torch.bfloat16)
    x = draw(40, HIDDEN, dtype=torch.bfloat16, seed=50)
    scores = draw(40, NUM_EXPERTS, dtype=torch.bfloat16, seed=51)
    output = layer.output(x, scores)
    for token in (0, 17, 39):
        alone = layer.output(x[token : token + 1], scores[token : token + 1])
        assert alone.equal(output[token : token + 1])


SIZES = [(8, 2), (64, 8), (128, 8), (128, 4), (256, 8), (60, 4), (5, 3), (16, 1)]


def assert_sorted(routing: ExpertRouting, chosen: Tensor, num_experts: int) -> None:
    """Check everything that follows from the chosen experts `[tokens, num_chosen]`."""
    sorted_experts, pairs = chosen.flatten().sort(stable=True)
    assert routing.chosen.equal(chosen.int())
    assert routing.pairs.equal(pairs.int())
    assert routing.places.flatten()[pairs].equal(torch.arange(len(pairs), device=DEVICE).int())
    numbers = torch.arange(num_experts + 1, device=DEVICE)
    assert routing.starts.equal(torch.searchsorted(sorted_experts, numbers).int())
    places: list[int] = []
    for expert, first, last in zip(
        routing.block_experts.tolist(),
        routing.block_firsts.tolist(),
        routing.block_lasts.tolist(),
        strict=True,
    ):
        if expert < num_experts:
            assert 0 < last - first <= BLOCK_ROWS
            assert (sorted_experts[first:last] == expert).all()
            places += range(first, last)
        else:
            assert expert == num_experts
    assert places == list(range(len(pairs)))
    counts = routing.starts.diff()
    filled = int(((counts + BLOCK_ROWS - 1) // BLOCK_ROWS).sum())
    assert (routing.block_experts < num_experts).sum() == filled


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 7, 150])
@pytest.mark.parametrize(("num_experts", "num_chosen"), SIZES)
def test_pairs_are_chosen_and_sorted_as_torch_does(
    num_experts: int, num_chosen: int, tokens: int, renormalize: bool
) -> None:
    scores = draw(tokens, num_experts, dtype=torch.float32, seed=tokens)
    layer = Experts(1, 1, num_experts, num_chosen, renormalize)
    weights, chosen = route(layer, scores)
    routing = route_pairs(scores, num_chosen, renormalize)
    torch.testing.assert_close(routing.weights, weights, rtol=1e-6, atol=1e-7)
    assert_sorted(routing, chosen, num_experts)


@pytest.mark.parametrize("tokens", [5, 70])
@pytest.mark.parametrize(("num_experts", "num_chosen"), SIZES)
def test_of_equal_scores_the_first_expert_is_better(
    num_experts: int, num_chosen: int, tokens: int
) -> None:
    scores = (3 * draw(tokens, num_experts, dtype=torch.float32, seed=1)).round().bfloat16()
    scores[0] = 0.0
    scores[1, ::2] = -0.0
    scores[1, 1::2] = 0.0
    scores[2] = -float("inf")
    layer = Experts(1, 1, num_experts, num_chosen)
    routing = route_pairs(scores, num_chosen, True)
    finite = torch.arange(tokens) != 2
    weights, chosen = route(layer, scores)
    torch.testing.assert_close(routing.weights[finite], weights[finite], rtol=1e-6, atol=1e-7)
    assert chosen[:3].tolist() == [list(range(num_chosen))] * 3
    assert_sorted(routing, chosen, num_experts)


def test_a_token_whose_scores_are_no_numbers_chooses_experts_and_gets_no_numbers() -> None:
    scores = draw(3, 64, dtype=torch.float32, seed=1)
    scores[1, 5:] = float("nan")
    routing = route_pairs(scores, 8, True)
    assert routing.weights[1].isnan().all()
    assert routing.weights[[0, 2]].isfinite().all()
    assert_sorted(routing, routing.chosen.long(), 64)


def test_all_tokens_can_choose_the_same_experts() -> None:
    scores = torch.arange(8, device=DEVICE).float().expand(200, 8).contiguous()
    assert_sorted(route_pairs(scores, 2, True), torch.tensor([[7, 6]] * 200, device=DEVICE), 8)


def test_rows_are_gathered_in_the_order_of_the_pairs_and_of_an_experts_inputs() -> None:
    x = draw(9, 1500, dtype=torch.bfloat16, seed=3)
    routing = route_pairs(draw(9, NUM_EXPERTS, dtype=torch.float32, seed=4), 2, True)
    pairs = routing.pairs.long()
    rows = x[pairs // 2]
    assert gather_rows(x, routing).equal(rows)
    orders = torch.stack([torch.randperm(1500) for _ in range(NUM_EXPERTS)]).int().to(DEVICE)
    experts = routing.chosen.flatten()[pairs].long()
    assert gather_rows(x, routing, orders).equal(rows.gather(1, orders[experts].long()))
