"""A mixture of experts on a GPU against plain torch."""

import pytest
import torch
from torch import Tensor, nn

from tests.triton_device import DEVICE  # isort: skip (before what it has to precede)

from worker_proc.gpu.kernels.experts import (
    BLOCK_ROWS,
    GroupedExperts,
    expert_blocks,
    grouped_experts,
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


def test_blocks_have_one_expert_and_all_pairs() -> None:
    for chosen in ([[3]] * 70, [[0, 2], [4, 2], [2, 1]], [[number % 5] for number in range(200)]):
        flat = torch.tensor(chosen, device=DEVICE)
        blocks = expert_blocks(flat, NUM_EXPERTS)
        places: list[int] = []
        for expert, first, last in zip(
            blocks.experts.tolist(), blocks.first.tolist(), blocks.last.tolist(), strict=True
        ):
            if expert < NUM_EXPERTS:
                assert 0 < last - first <= BLOCK_ROWS
                assert (flat.flatten()[blocks.pairs[first:last]] == expert).all()
                places += range(first, last)
        assert places == list(range(flat.numel()))
