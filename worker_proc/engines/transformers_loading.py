"""Build a model of transformers and load its weights from safetensors.

Fixed rotary frequencies, linear layers packed for a CPU, and layers split over tensor parallel
ranks come before `load_transformers_model`.
"""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quadriga.errors import ConfigError, ModelError, QuadrigaError
from quadriga.server.models.families.config_values import check_tp_size
from quadriga.server.models.model_impl import native_refusal
from quadriga.server.models.resolve import ModelFiles
from worker_proc.engines.torch_engine import multiply_packed, pack_weight
from worker_proc.engines.transformers_engine import AttentionFunction, TransformersModel
from worker_proc.loading.loader import shown_names
from worker_proc.loading.sharding import TPRank

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup


# Keep the rotary frequencies of a model of transformers the same in every step.
#
# With the scaling type `longrope`, transformers chooses the frequencies in each forward pass by
# the largest position in it: here, by that of any request in the step. (`dynamic` changes them
# only beyond `max_position_embeddings`, which a context never exceeds.)


def fix_rope(model: nn.Module, context_length: int) -> None:
    """Fix the frequencies of `longrope` to those of the longest sequence of a context."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fix(module, kinds, context_length, {})  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                kinds[layer_type] = _fix(module, kind, context_length, {"layer_type": layer_type})


def _fix(module: Any, kind: str, context_length: int, layer_type: dict[str, str]) -> str:
    """Return the type that leaves the frequencies as they are now."""
    if kind != "longrope":
        return kind
    device = next(iter(module.buffers())).device
    last = torch.tensor([[context_length - 1]], device=device)
    module(torch.zeros(1, 1, 1, device=device), last, **layer_type)
    return "default"


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
        if type(module) is nn.Linear and (packed := pack_weight(module.weight)) is not None:
            if owners[id(module.weight)] == 1:
                module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
            layer: Any = module
            layer.forward = partial(multiply_packed, packed, module.bias)


# Split a model of transformers over tensor parallel ranks, by the plan in its config.
#
# transformers names, for each layer of a base model, how it is split (`base_model_tp_plan`,
# https://huggingface.co/docs/transformers/perf_infer_gpu_multi). Embedding and head stay whole.

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
        base: the model without its head, with whole weights.
        plan: the style of each module or parameter; `*` stands for the number of a layer.
        part: the rank.
        ranks: sums over the ranks.
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


SEED_OF_DUMMY_WEIGHTS = 0


def load_transformers_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    part: TPRank,
    ranks: "TPGroup | None",
) -> TransformersModel:
    """Build a model, load its weights and probe its attention.

    Args:
        files: the model's files; without weights, the model gets random ones.
        dtype: of the weights, but for those that transformers keeps in float32.
        device: of the weights.
        part: the rank whose part of each layer is kept; the whole model passes the main memory.
        ranks: the processes with the other parts, if there are any.

    Raises:
        ModelError: transformers cannot build the model, tensors are missing, or attention over
            pages would not compute the same.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    function = AttentionFunction()
    try:
        config = read_config(files)
        place = device if ranks is None else torch.device("cpu")
        build = _random_model if files.weights is None else _from_safetensors
        causal_lm = build(files, config, dtype, place, function.name)
        causal_lm.eval().requires_grad_(False)
        if ranks is not None:
            split_layers(causal_lm.base_model, config.base_model_tp_plan, part, ranks)
            causal_lm.to(device)
        fix_rope(causal_lm, files.context_length)
        pack_linears(causal_lm)
        model = TransformersModel(causal_lm, function, files.context_length)
    except QuadrigaError as error:
        raise ModelError(_refusal(files, str(error))) from None
    except Exception as error:  # whatever the model's code raises ends the start
        raise ModelError(_refusal(files, f"{type(error).__name__}: {_one_line(error)}")) from error
    num_rows = len(causal_lm.get_input_embeddings().weight)
    for what, is_wrong in (
        (f"{model.vocab_size} logits", model.vocab_size != files.vocab_size),
        (f"an embedding of {num_rows} ids", num_rows < files.vocab_size),
    ):
        if is_wrong:
            reason = f"it has {what}, but config.json a vocab_size of {files.vocab_size}"
            raise ModelError(_refusal(files, reason))
    return model


def build_empty(files: ModelFiles, dtype: torch.dtype) -> nn.Module:
    """Build a model whose weights have no storage.

    Raises:
        ModelError: transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                read_config(files), dtype=dtype, trust_remote_code=files.trust_remote_code
            )
    except Exception as error:  # whatever the model's code raises ends the start
        raise ModelError(_refusal(files, f"{type(error).__name__}: {_one_line(error)}")) from error
    return model


def read_config(files: ModelFiles) -> Any:
    """Return the model's configuration as transformers reads it."""
    from transformers import AutoConfig

    if Path(files.location).is_dir():
        return AutoConfig.from_pretrained(
            files.location, trust_remote_code=files.trust_remote_code, local_files_only=True
        )
    return AutoConfig.for_model(**files.config)


def _random_model(
    files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device, attention: str
) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(), device:
        torch.manual_seed(SEED_OF_DUMMY_WEIGHTS)
        return AutoModelForCausalLM.from_config(
            config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=files.trust_remote_code,
        )


def _from_safetensors(
    files: ModelFiles, config: Any, dtype: torch.dtype, device: torch.device, attention: str
) -> Any:
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model, report = load(
        files.weights,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        device_map=None if device.type == "cpu" else device,
        trust_remote_code=files.trust_remote_code,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
    )
    for what, key in (
        ("lacks", "missing_keys"),
        ("has unexpected", "unexpected_keys"),
        ("has tensors of another shape, in", "mismatched_keys"),
    ):
        if names := sorted(str(name) for name in report.get(key) or ()):
            raise ModelError(f"the checkpoint {what} {len(names)} tensors: {shown_names(names)}")
    return model


def _refusal(files: ModelFiles, reason: str) -> str:
    native = native_refusal(files) if files.model_impl == "auto" else None
    before = f"{native}; " if native else ""
    model_type = files.config.get("model_type")
    return f"{files.location}: {before}transformers cannot serve {model_type}: {reason}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
