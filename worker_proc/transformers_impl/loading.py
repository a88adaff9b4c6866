"""Build a model of transformers and load its weights from safetensors."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quadriga.errors import ModelError, QuadrigaError
from quadriga.model_files.model_impl.choice import native_refusal
from quadriga.model_files.resolve import ModelFiles
from worker_proc.loading.sharding import TPRank
from worker_proc.transformers_impl.attention_call import AttentionFunction
from worker_proc.transformers_impl.linear import pack_linears
from worker_proc.transformers_impl.model import TransformersModel
from worker_proc.transformers_impl.parallel import split_layers
from worker_proc.transformers_impl.rope import fix_rope

if TYPE_CHECKING:
    from worker_proc.distributed.tp_group import TPGroup

SEED_OF_DUMMY_WEIGHTS = 0
MAX_NAMES_SHOWN = 5


def load_transformers_model(
    files: ModelFiles,
    dtype: torch.dtype,
    device: torch.device,
    part: TPRank,
    ranks: "TPGroup | None",
) -> TransformersModel:
    """Build a model, load its weights and probe its attention.

    Args:
        files: The model's files; without weights, the model gets random ones.
        dtype: Of the weights, but for those that transformers keeps in float32.
        device: Of the weights.
        part: The rank whose part of each layer is kept; the whole model passes the main memory.
        ranks: The processes with the other parts, if there are any.

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
            more = len(names) - MAX_NAMES_SHOWN
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
            raise ModelError(f"the checkpoint {what} {len(names)} tensors: {shown}")
    return model


def _refusal(files: ModelFiles, reason: str) -> str:
    native = native_refusal(files) if files.model_impl == "auto" else None
    before = f"{native}; " if native else ""
    model_type = files.config.get("model_type")
    return f"{files.location}: {before}transformers cannot serve {model_type}: {reason}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
