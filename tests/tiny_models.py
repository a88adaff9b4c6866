"""Tiny random models as real Hugging Face directories: weights, configs and a tokenizer.

Their output is random but always the same, and they load quickly.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 512
CONTEXT_LENGTH = 128
END_OF_TEXT = "<|endoftext|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SENTENCES = [
    "Four horses abreast draw the chariot: tokenizer, scheduler, worker and detokenizer.",
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "A token is a piece of a word; a word is a piece of a thought; 0 1 2 3 4 5 6 7 8 9.",
    "Grüße aus dem Süden: 你好, привет, こんにちは, 👋🏽 — and a line\nbreak, too.",
    "def main() -> None:\n    print('hello, world')\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tiny_gpt2(directory: Path, **changes: Any) -> Path:
    """Write a GPT-2 of 2 layers, 4 heads of 12 and context 128; return the directory.

    `changes` are further fields of GPT2Config.
    """
    end = write_tokenizer(directory)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_positions": CONTEXT_LENGTH,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "bos_token_id": end,
        "eos_token_id": end,
        **changes,
    }
    return _save(GPT2LMHeadModel, GPT2Config(**fields), directory)


def tiny_llama(directory: Path, tie: bool = True, **changes: Any) -> Path:
    """Write a Llama of 3 layers, 6 heads of 16, 2 key/value heads and context 256.

    Return the directory. `changes` are further fields of LlamaConfig.
    """
    return _like_llama(LlamaForCausalLM, LlamaConfig, directory, tie, changes)


def tiny_mistral(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with a window of 24 tokens."""
    changes = {"sliding_window": 24, "head_dim": 16, **changes}
    return _like_llama(MistralForCausalLM, MistralConfig, directory, False, changes)


def tiny_qwen2(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with biased queries, keys and values."""
    return _like_llama(Qwen2ForCausalLM, Qwen2Config, directory, True, changes)


def tiny_qwen3(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with normalised heads of 24."""
    return _like_llama(Qwen3ForCausalLM, Qwen3Config, directory, True, {"head_dim": 24, **changes})


def tiny_mixtral(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with 5 experts, 2 of which are chosen, and a window of 24."""
    changes = {"num_local_experts": 5, "intermediate_size": 56, "sliding_window": 24, **changes}
    return _like_llama(MixtralForCausalLM, MixtralConfig, directory, False, changes)


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
    return _like_llama(Qwen3MoeForCausalLM, Qwen3MoeConfig, directory, False, changes)


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
    return _like_llama(GraniteMoeForCausalLM, GraniteMoeConfig, directory, True, changes)


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
    return _like_llama(GptOssForCausalLM, GptOssConfig, directory, False, changes)


# The families that share Llama's code. Tests take their parameters from here.
LIKE_LLAMA: dict[str, Callable[[Path], Path]] = {
    "mistral": tiny_mistral,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
}
# The families with a mixture of experts.
EXPERTS: dict[str, Callable[[Path], Path]] = {
    "mixtral": tiny_mixtral,
    "qwen3_moe": tiny_qwen3_moe,
    "granitemoe": tiny_granitemoe,
    "gpt_oss": tiny_gpt_oss,
}


def tiny_gemma2(directory: Path, **changes: Any) -> Path:
    """Write a Gemma 2 of 4 layers, every second with a window of 20, and low soft caps."""
    fields = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0, "sliding_window": 20}
    return _gemma(Gemma2ForCausalLM, Gemma2Config, directory, fields | changes)


def tiny_gemma3(directory: Path, **changes: Any) -> Path:
    """Write a Gemma 3 of 4 layers; the third has no window, but scaled positions."""
    fields = {
        "sliding_window": 20,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    return _gemma(Gemma3ForCausalLM, Gemma3TextConfig, directory, fields | changes)


GEMMA: dict[str, Callable[[Path], Path]] = {"gemma2": tiny_gemma2, "gemma3_text": tiny_gemma3}


def _gemma(model_class: Any, config_class: Any, directory: Path, changes: dict[str, Any]) -> Path:
    fields = {"num_hidden_layers": 4, "head_dim": 24, "query_pre_attn_scalar": 20, **changes}
    return _like_llama(model_class, config_class, directory, True, fields)


def _like_llama(
    model_class: Any, config_class: Any, directory: Path, tie: bool, changes: dict[str, Any]
) -> Path:
    end = write_tokenizer(directory)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2 * CONTEXT_LENGTH,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tie,
        "bos_token_id": end,
        "eos_token_id": end,
        **changes,
    }
    return _save(model_class, config_class(**fields), directory)


def write_tokenizer(directory: Path) -> int:
    """Train a byte-level BPE on a few sentences, and return the end-of-text id."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    return end


def _save(model_class: Any, config: Any, directory: Path) -> Path:
    """Save a model with weights large enough that the top token is clearly the most likely."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        model = model_class(config)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() >= 2 and name not in ("lm_head.weight",):
                    weight.normal_(0.0, 0.12)
                elif weight.dim() == 1:
                    weight.add_(torch.randn(weight.shape) * 0.05)
    model.save_pretrained(directory)
    return directory
