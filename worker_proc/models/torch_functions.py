"""Functions of model operations in torch, which the torch engine and the GPU's share."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker_proc.models.layers import Activation, Experts

# gpt-oss: https://arxiv.org/abs/2508.10925
CLAMPED_SWIGLU_SLOPE = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Apply an activation, except CLAMPED_SWIGLU, which needs a gate."""
    if activation is Activation.SILU:
        return F.silu(x)
    if activation is Activation.RELU:
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation is Activation.GELU_TANH else "none")


def gate_up(activation: Activation, x: Tensor) -> Tensor:
    """Return activation(gate) * up `[rows, inner]` of [gate, up] `[rows, 2 * inner]`."""
    gate, up = x.chunk(2, -1)
    if activation is not Activation.CLAMPED_SWIGLU:
        return activate(activation, gate) * up
    gate = gate.clamp(max=CLAMPED_SWIGLU_LIMIT)
    up = up.clamp(-CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    return gate * torch.sigmoid(CLAMPED_SWIGLU_SLOPE * gate) * (up + 1)


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(x / softcap); None: `x`."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def route(experts: Experts, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token.

    Args:
        experts: The experts.
        scores: `[tokens, num_experts]`.

    Returns:
        The weights of the chosen experts `[tokens, num_chosen]` in float32, and their numbers.
    """
    scores = scores.float()
    if experts.renormalize:
        best, chosen = scores.topk(experts.num_chosen, -1)
        return best.softmax(-1), chosen
    weights, chosen = scores.softmax(-1).topk(experts.num_chosen, -1)
    return weights, chosen
