"""Weights are rounded to 4 bits with the least error, by the importance of their inputs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny_models import tiny_llama
from tests.unit.worker_driver import load_on_cpu
from worker_proc.cpu.weights import round_to_int4
from worker_proc.models.layers import Embedding, Linear
from worker_proc.models.quantized_weights import GROUP
from worker_proc.startup.build import measure_inputs

INPUTS = 4 * GROUP


def group_errors(weight: Tensor, rounded: Tensor, importance: Tensor) -> Tensor:
    squares = (weight - rounded).square() * importance
    return squares.unflatten(1, (-1, GROUP)).sum(-1)


def rounded_from_least_to_greatest(weight: Tensor) -> Tensor:
    groups = weight.unflatten(1, (-1, GROUP))
    least = groups.amin(-1, keepdim=True).half().float()
    scale = ((groups.amax(-1, keepdim=True) - least) / 15).half().float().clamp(min=1e-8)
    return (((groups - least) / scale).round().clamp(0, 15) * scale + least).flatten(1)


def drawn(kind: str) -> Tensor:
    torch.manual_seed(1)
    weight = torch.randn(37, INPUTS)
    if kind == "heavy tails":
        return weight**3
    if kind == "small":
        return weight * 1e-5
    if kind == "constant":
        return weight[:, :1].expand(-1, INPUTS).contiguous()
    return weight


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "small", "constant"])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_no_group_has_a_larger_error_than_from_its_minimum_to_its_maximum(
    kind: str, spread: float
) -> None:
    weight = drawn(kind)
    importance = (torch.randn(INPUTS) * spread).exp()
    ours = group_errors(weight, round_to_int4(weight, importance).dense(), importance)
    theirs = group_errors(weight, rounded_from_least_to_greatest(weight), importance)
    assert (ours <= theirs * 1.001 + 1e-12).all()
    if kind in ("normal", "heavy tails"):
        assert ours.sum() < 0.9 * theirs.sum()


@pytest.mark.parametrize(("first", "last"), [(0, 15), (1, 13), (0, 12)])
def test_weights_on_a_grid_are_exact(first: int, last: int) -> None:
    torch.manual_seed(2)
    codes = torch.randint(first, last + 1, (33, INPUTS // GROUP, GROUP))
    codes[..., 0], codes[..., 1] = first, last
    scale = torch.rand(33, INPUTS // GROUP, 1).add(0.1).half().float()
    minimum = torch.randn(33, INPUTS // GROUP, 1).half().float()
    weight = (codes * scale + minimum).flatten(1)
    difference = (round_to_int4(weight).dense() - weight).abs().unflatten(1, (-1, GROUP))
    assert (difference.amax(-1, keepdim=True) <= 2e-3 * scale + 1e-3 * minimum.abs()).all()


def test_important_inputs_are_more_precise() -> None:
    weight, importance = drawn("normal"), torch.ones(INPUTS)
    importance[5::GROUP] = 1e4
    plain = (round_to_int4(weight).dense() - weight)[:, 5::GROUP]
    weighted = (round_to_int4(weight, importance).dense() - weight)[:, 5::GROUP]
    assert weighted.square().mean() < 0.2 * plain.square().mean()


def test_inputs_that_are_always_zero_still_have_weights() -> None:
    weight, importance = drawn("normal"), torch.ones(INPUTS)
    importance[GROUP : 2 * GROUP] = 0
    rounded = round_to_int4(weight, importance).dense()
    assert torch.equal(rounded, round_to_int4(weight, importance).dense())
    assert (rounded - weight).square().mean() < 0.01
    assert torch.equal(
        round_to_int4(weight, torch.zeros(INPUTS)).dense(), round_to_int4(weight).dense()
    )


def test_a_row_shorter_than_its_groups_is_padded() -> None:
    weight = drawn("normal")[:, :50]
    blocks = round_to_int4(weight, torch.rand(50))
    assert blocks.codes.shape == (37, 2, GROUP)
    assert (blocks.dense()[:, :50] - weight).square().mean() < 0.02


@pytest.mark.parametrize("context_length", [7, 128])
def test_every_multiplied_matrix_is_measured(tmp_path: Path, context_length: int) -> None:
    model = load_on_cpu(tiny_llama(tmp_path))
    measure_inputs(model, context_length)
    layers = [layer for layer in model.modules() if isinstance(layer, Linear | Embedding)]
    assert len(layers) > 4
    for layer in layers:
        assert layer.importance is not None
        assert layer.importance.shape == layer.weight.shape[1:]
        assert (layer.importance > 0).any()


def test_measured_inputs_are_the_same_each_time(tmp_path: Path) -> None:
    directory = tiny_llama(tmp_path)
    first, second = load_on_cpu(directory), load_on_cpu(directory)
    for model in (first, second):
        measure_inputs(model, 128)
    measured = [
        [layer.importance for layer in model.modules() if isinstance(layer, Linear)]
        for model in (first, second)
    ]
    assert measured[0]
    for one, other in zip(*measured, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
