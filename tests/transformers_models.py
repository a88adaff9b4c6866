"""Tiny random models of families that no native file runs."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from quadriga.server.config.server_config import ServerConfig
from quadriga.server.models.resolve import resolve_model
from tests.tiny_models import VOCAB_SIZE, _save, write_tokenizer
from worker_proc.startup.build import make_runner
from worker_proc.step.runner import Runner

CONTEXT_LENGTH = 96
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},  # one residual for attention and MLP
    "stablelm": {"partial_rotary_factor": 0.25},
    "nemotron": {"head_dim": 24},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "cohere2": {  # a window in two of three layers, no rotation in the third
        "num_hidden_layers": 3,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "vaultgemma": {  # scores and logits have a soft cap
        "head_dim": 24,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "ministral": {"head_dim": 16, "sliding_window": 12},  # a window in every layer
    "granite_swa": {"head_dim": 16, "sliding_window": 12},  # sinks
    "glm4_moe": {  # an expert for all tokens, and those that a router chooses
        "head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {  # values of another size than keys; experts in groups
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}


def tiny_model(kind: str, directory: Path, **changes: Any) -> Path:
    """Write a model of a `model_type` of transformers with 2 layers and 4 heads.

    Return the directory. `changes` are further fields of its config.
    """
    end = write_tokenizer(directory)
    fields = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": CONTEXT_LENGTH,
        "hidden_size": 64,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": None,
        **FAMILIES.get(kind, {}),
        **changes,
    }
    config = AutoConfig.for_model(kind, **fields)
    return _save(AutoModelForCausalLM.from_config, config, directory)


def transformers_runner(directory: Path, **flags: Any) -> Runner:
    """Build a runner of float32 on the CPU with pages of 4 tokens."""
    defaults = {"device": "cpu", "dtype": "float32", "page_size": 4, "max_total_tokens": 1024,
                "max_running_requests": 8, "model_impl": "transformers"}  # fmt: skip
    config = ServerConfig().replace(**{**defaults, **flags, "model": str(directory)})
    return make_runner(config, resolve_model(config.model))
