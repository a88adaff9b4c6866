"""Tiny random models with a mixture of experts, written as those of tiny_models.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.tiny_models import like_llama


def tiny_mixtral(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with 5 experts, 2 of which are chosen, and a window of 24."""
    changes = {"num_local_experts": 5, "intermediate_size": 56, "sliding_window": 24, **changes}
    return like_llama(MixtralForCausalLM, MixtralConfig, directory, False, changes)


def tiny_qwen3_moe(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_qwen3 with 6 experts, 3 of which are chosen, and one dense layer."""
    changes = {
        "head_dim": 24,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
        **changes,
    }
    return like_llama(Qwen3MoeForCausalLM, Qwen3MoeConfig, directory, False, changes)


def tiny_granitemoe(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with all scales of Granite and 5 experts."""
    changes = {
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "embedding_multiplier": 1.5,
        "logits_scaling": 0.7,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.3,
        **changes,
    }
    return like_llama(GraniteMoeForCausalLM, GraniteMoeConfig, directory, True, changes)


def tiny_gpt_oss(directory: Path, **changes: Any) -> Path:
    """Write a gpt-oss of 4 layers, with windows of 20, yarn, sinks and 6 experts."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    }
    changes = {
        "num_hidden_layers": 4,
        "head_dim": 24,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 64,
        "sliding_window": 20,
        "rope_parameters": rope,
        **changes,
    }
    return like_llama(GptOssForCausalLM, GptOssConfig, directory, False, changes)


def tiny_mxfp4(directory: Path) -> tuple[Path, Path]:
    """Write a gpt-oss twice: with decoded experts, and with experts in MXFP4."""
    decoded, stored = tiny_gpt_oss(directory / "decoded"), tiny_gpt_oss(directory / "stored")
    tensors = load_file(decoded / "model.safetensors")
    draw, packed = torch.Generator().manual_seed(3), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32, 16)
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw)
        scales = torch.randint(121, 126, shape[:3], dtype=torch.uint8, generator=draw)
        packed |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        del packed[name]
        values = convert_moe_packed_tensors(codes, scales).float()
        assert values.shape == tensors[name].shape
        tensors[name] = values.contiguous()
    save_file(tensors, decoded / "model.safetensors", {"format": "pt"})
    save_file(packed, stored / "model.safetensors", {"format": "pt"})
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (stored / "config.json").write_text(json.dumps(config))
    return decoded, stored


EXPERTS: dict[str, Callable[..., Path]] = {
    "mixtral": tiny_mixtral,
    "qwen3_moe": tiny_qwen3_moe,
    "granitemoe": tiny_granitemoe,
    "gpt_oss": tiny_gpt_oss,
}
