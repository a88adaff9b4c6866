"""A mixture of experts on a GPU."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from worker_proc.gpu.kernels.activations import gate_up
from worker_proc.gpu.kernels.experts import (
    ExpertWeights,
    expert_blocks,
    multiply_experts,
    sum_experts,
)
from worker_proc.models.base import Model
from worker_proc.models.layers import Experts, Linear
from worker_proc.models.torch_functions import route


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The experts of a layer, whose weights stay where they are.

    Attributes:
        experts: The layer.
        gate_up, down: The addresses of its weights.
    """

    experts: Experts
    gate_up: ExpertWeights
    down: ExpertWeights

    def output(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, without synchronising with the host.

        Args:
            x: `[tokens, hidden]`.
            scores: `[tokens, num_experts]` the outputs of the router.

        Returns:
            `[tokens, hidden]`.
        """
        weights, chosen = route(self.experts, scores)
        num_chosen = self.experts.num_chosen
        blocks = expert_blocks(chosen, scores.shape[1])
        inner = multiply_experts(x, self.gate_up, blocks, num_chosen, scattered=False)
        inner = gate_up(inner, self.experts.activation)
        outputs = multiply_experts(inner, self.down, blocks, num_chosen, scattered=True)
        return sum_experts(outputs, weights.contiguous())


def grouped_experts(model: Model) -> dict[Experts, GroupedExperts]:
    """Note where the weights of all experts of a model are."""
    return {
        module: GroupedExperts(
            module,
            _expert_weights(cast(Iterable[Linear], module.gate_up)),
            _expert_weights(cast(Iterable[Linear], module.down)),
        )
        for module in model.modules()
        if isinstance(module, Experts)
    }


def _expert_weights(projections: Iterable[Linear]) -> ExpertWeights:
    projections = list(projections)
    weights = [projection.weight for projection in projections]
    biases = [projection.bias for projection in projections if projection.bias is not None]
    for weight in weights:  # as the kernel reads it
        assert weight.is_contiguous()
        assert weight.data_ptr() % 16 == 0
    return ExpertWeights(
        _addresses(weights), _addresses(biases) if biases else None, len(weights[0])
    )


def _addresses(tensors: list[Tensor]) -> Tensor:
    addresses = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device=tensors[0].device)
