"""Multiply bfloat16 weights of a model of transformers as oneDNN lays them out."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from worker_proc.torch_engine import PACKED_FOR_ROWS


def pack_linears(model: nn.Module) -> None:
    """Pack each bfloat16 linear layer on a CPU, which is nearly twice as fast at few rows.

    A packed weight takes the place of the layer's own, of which only dtype and shape remain,
    unless another layer has it, too, such as a tied embedding.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for module in model.modules():
        if type(module) is nn.Linear and _can_pack(module.weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(
                module.weight.detach(), PACKED_FOR_ROWS
            )
            if owners[id(module.weight)] == 1:
                module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
            layer: Any = module
            layer.forward = partial(_multiply, packed, module.bias)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _multiply(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result
