"""Split a model of transformers over tensor parallel ranks, by the plan in its config.

transformers names, for each layer of a base model, how it is split (`base_model_tp_plan`,
https://huggingface.co/docs/transformers/perf_infer_gpu_multi). Embedding and head stay whole.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quadriga.errors import ConfigError
from quadriga.model_files.config.config_values import check_tp_size
from worker_proc.loading.sharding import TPRank

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

COLUMN, PACKED_COLUMN, ROW = "colwise", "packed_colwise", "rowwise"
SUM_OF_EXPERTS = "moe_tp_experts"
WHOLE = "replicated_with_grad_allreduce"
STYLES = {COLUMN, PACKED_COLUMN, ROW, SUM_OF_EXPERTS, WHOLE}


def check_plan(config: Any, tp_size: int) -> None:
    """Raise ConfigError if a model cannot be split over `tp_size` ranks."""
    plan = getattr(config, "base_model_tp_plan", None) or {}
    unknown = sorted(set(plan.values()) - STYLES)
    if unknown or not plan:
        reason = f"splits layers by {', '.join(unknown)}" if unknown else "has no plan"
        raise ConfigError(
            f"tp is {tp_size}: transformers {reason} for {config.model_type}; supported: "
            + ", ".join(sorted(STYLES))
        )
    heads = config.num_attention_heads
    sizes = {"heads": heads}
    sizes["key_and_value_heads"] = getattr(config, "num_key_value_heads", None) or heads
    for name in ("intermediate_size", "moe_intermediate_size"):
        if size := getattr(config, name, None):
            sizes[name] = size
    check_tp_size(tp_size, **sizes)


def split_layers(base: nn.Module, plan: dict[str, str], part: TPRank, ranks: "TPGroup") -> None:
    """Cut the weights of a base model to one rank's part, and sum what is split by rows.

    Args:
        base: The model without its head, with whole weights.
        plan: The style of each module or parameter; `*` stands for the number of a layer.
        part: The rank.
        ranks: Sums over the ranks.
    """

    def sum_over_ranks(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return ranks.all_reduce(output)

    for name, module in base.named_modules():
        style = _style(name, plan)
        if style == SUM_OF_EXPERTS:
            module.register_forward_hook(sum_over_ranks)
        elif isinstance(module, nn.Linear) and style in (COLUMN, PACKED_COLUMN, ROW):
            _split_linear(module, style, part)
            if style == ROW:
                module.register_forward_hook(sum_over_ranks)
        for parameter_name, weight in list(module.named_parameters(recurse=False)):
            if style := _style(f"{name}.{parameter_name}", plan):
                cut = _cut(weight, style, part)
                setattr(module, parameter_name, nn.Parameter(cut, requires_grad=False))


def _style(name: str, plan: dict[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _split_linear(linear: nn.Linear, style: str, part: TPRank) -> None:
    """Keep one rank's outputs or inputs; with inputs, only rank 0 keeps the bias."""
    linear.weight = nn.Parameter(_cut(linear.weight, style, part), requires_grad=False)
    if linear.bias is None:
        return
    if style != ROW:
        bias = _cut(linear.bias, style, part)
    else:
        bias = linear.bias if part.rank == 0 else torch.zeros_like(linear.bias)
    linear.bias = nn.Parameter(bias, requires_grad=False)


def _cut(weight: Tensor, style: str, part: TPRank) -> Tensor:
    """Return one rank's part of `[outputs]`, `[outputs, inputs]` or `[experts, outputs, inputs]`.

    Packed outputs are two matrices of equal height, each of which is cut.
    """
    if style == WHOLE:
        return weight
    outputs = max(0, weight.dim() - 2)
    if style == PACKED_COLUMN:
        halves = weight.chunk(2, outputs)
        return torch.cat([_cut(half, COLUMN, part) for half in halves], outputs)
    dim = outputs if style == COLUMN else outputs + 1
    return weight.detach().chunk(part.count, dim)[part.rank].clone()
