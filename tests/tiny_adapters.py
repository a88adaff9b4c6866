"""Random adapters (LoRA) as PEFT writes them, and PEFT's own models with them."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def make_adapter(
    model_dir: Path, out_dir: Path, seed: int = 0, rank: int = 4, model: Any = None, **changes: Any
) -> Path:
    """Write an adapter that changes a model's answers; return its directory.

    Args:
        model_dir: of the model, a directory of Hugging Face's format.
        out_dir: of the adapter.
        seed: of its numbers.
        rank: of its products.
        model: a model of transformers that is loaded from `model_dir`, which stays as it is; None:
            it is loaded here.
        changes: fields of PEFT's LoraConfig; without `target_modules`, all projections change.
    """
    from peft import LoraConfig, get_peft_model

    if model is None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    fields = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        **changes,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**fields))
        with torch.no_grad():
            for name, values in adapted.named_parameters():
                if values.requires_grad:
                    _randomize(name, values)
        adapted.save_pretrained(str(out_dir))
    adapted.unload()
    return out_dir


def _randomize(name: str, values: torch.Tensor) -> None:
    if "magnitude" in name:
        values.mul_(torch.rand_like(values) * 0.5 + 0.75)
    elif "lora_A" in name or "embedding_A" in name:
        values.normal_(0.0, values.shape[-1] ** -0.5)
    elif "lora_" in name:
        values.normal_(0.0, 0.2)
    else:  # biases, and modules that are saved whole
        values.add_(torch.randn_like(values) * 0.05)
