"""Tiny random models as real Hugging Face directories: weights, configs and a tokenizer.

Their output is random but always the same, and they load quickly.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
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
GEMMA3_FIELDS: dict[str, Any] = {
    "sliding_window": 20,
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


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


def tiny_gptj(directory: Path, **changes: Any) -> Path:
    """Write a GPT-J of 3 layers and 4 heads of 12, of which 8 channels are rotated."""
    end = write_tokenizer(directory)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_positions": CONTEXT_LENGTH,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 4,
        "rotary_dim": 8,
        "bos_token_id": end,
        "eos_token_id": end,
        **changes,
    }
    return _save(GPTJForCausalLM, GPTJConfig(**fields), directory)


def tiny_llama(directory: Path, tie: bool = True, **changes: Any) -> Path:
    """Write a Llama of 3 layers, 6 heads of 16, 2 key/value heads and context 256.

    Return the directory. `changes` are further fields of LlamaConfig.
    """
    return like_llama(LlamaForCausalLM, LlamaConfig, directory, tie, changes)


def odd_llama(directory: Path, **changes: Any) -> Path:
    """Write a Llama with 8 biased heads of 24 over one key/value head, and sizes that are odd.

    The 150 channels of its MLP and its 517 tokens fill no whole number of vectors; its embedding is
    not tied. `changes` are further fields of LlamaConfig.
    """
    fields = {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "mlp_bias": True,
        "intermediate_size": 150,
        "vocab_size": VOCAB_SIZE + 5,
    }
    return tiny_llama(directory, tie=False, **{**fields, **changes})


def tiny_mistral(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with a window of 24 tokens."""
    changes = {"sliding_window": 24, "head_dim": 16, **changes}
    return like_llama(MistralForCausalLM, MistralConfig, directory, False, changes)


def tiny_olmo2(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with norms after its layers and of all heads together."""
    return like_llama(Olmo2ForCausalLM, Olmo2Config, directory, False, changes)


def tiny_olmo3(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_olmo2 with windows of 24 tokens and scaled positions elsewhere."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        "full_attention": {**yarn, "rope_theta": 500000.0},
    }
    fields = {"num_hidden_layers": 4, "sliding_window": 24, "rope_parameters": ropes}
    return like_llama(Olmo3ForCausalLM, Olmo3Config, directory, False, {**fields, **changes})


def tiny_granite(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with factors, and biases of attention and MLP."""
    fields = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 1.7,
        "attention_bias": True,
        "mlp_bias": True,
        **changes,
    }
    return like_llama(GraniteForCausalLM, GraniteConfig, directory, True, fields)


def tiny_smollm3(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with 4 layers, of which the last rotates nothing."""
    changes = {"num_hidden_layers": 4, "attention_bias": True, "pad_token_id": 0, **changes}
    return like_llama(SmolLM3ForCausalLM, SmolLM3Config, directory, True, changes)


def tiny_gemma(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with GELU, scaled embeddings and heads of 24."""
    return like_llama(GemmaForCausalLM, GemmaConfig, directory, True, {"head_dim": 24, **changes})


def tiny_exaone4(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with norms after its layers, and windows of 24 tokens.

    The second of its 4 layers has no window and rotates nothing; nor has the last.
    """
    fields = {"num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2}
    return like_llama(Exaone4ForCausalLM, Exaone4Config, directory, False, {**fields, **changes})


def tiny_seed_oss(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with heads of 24 and biased queries, keys and values."""
    changes = {"head_dim": 24, **changes}
    return like_llama(SeedOssForCausalLM, SeedOssConfig, directory, False, changes)


def tiny_ernie4_5(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with biases that rotates neighbouring channels."""
    changes = {"head_dim": 24, "use_bias": True, **changes}
    return like_llama(Ernie4_5ForCausalLM, Ernie4_5Config, directory, True, changes)


def tiny_helium(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama that rotates neighbouring channels."""
    changes = {"head_dim": 16, "attention_bias": True, "mlp_bias": True, **changes}
    return like_llama(HeliumForCausalLM, HeliumConfig, directory, False, changes)


def tiny_qwen2(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with biased queries, keys and values."""
    return like_llama(Qwen2ForCausalLM, Qwen2Config, directory, True, changes)


def tiny_qwen3(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_llama with normalized heads of 24."""
    return like_llama(Qwen3ForCausalLM, Qwen3Config, directory, True, {"head_dim": 24, **changes})


def tiny_phi3(directory: Path, **changes: Any) -> Path:
    """Write a model of 6 heads of 20, 12 of their channels rotated, and a window of 24."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.6}
    changes = {"sliding_window": 24, "rope_parameters": rope, "pad_token_id": 0, **changes}
    return _odd_sizes(Phi3ForCausalLM, Phi3Config, directory, changes)


def tiny_starcoder2(directory: Path, **changes: Any) -> Path:
    """Write a model of 6 biased heads of 20 with a window of 24 tokens."""
    changes = {"sliding_window": 24, "tie_word_embeddings": True, **changes}
    return _odd_sizes(Starcoder2ForCausalLM, Starcoder2Config, directory, changes)


def tiny_glm(directory: Path, **changes: Any) -> Path:
    """Write a model of 6 biased heads of 28, half of their channels rotated in pairs."""
    changes = {"head_dim": 28, "pad_token_id": 0, **changes}
    return _odd_sizes(GlmForCausalLM, GlmConfig, directory, changes)


def tiny_glm4(directory: Path, **changes: Any) -> Path:
    """Write a model like tiny_glm with norms before and after each block."""
    changes = {"head_dim": 28, "pad_token_id": 0, **changes}
    return _odd_sizes(Glm4ForCausalLM, Glm4Config, directory, changes)


def tiny_gpt_neox(directory: Path, **changes: Any) -> Path:
    """Write a model of 6 heads of 24, 6 of their channels rotated, with parallel blocks."""
    changes = {"hidden_size": 144, "num_key_value_heads": 6, **changes}
    return _odd_sizes(GPTNeoXForCausalLM, GPTNeoXConfig, directory, changes)


def tiny_opt(directory: Path, **changes: Any) -> Path:
    """Write a model of 6 heads of 20 with learned positions and ReLU."""
    sizes = {"ffn_dim": 152, "num_key_value_heads": 6}
    changes = {**sizes, "tie_word_embeddings": True, "pad_token_id": 0, **changes}
    return _odd_sizes(OPTForCausalLM, OPTConfig, directory, changes)


def _odd_sizes(
    model_class: Any, config_class: Any, directory: Path, changes: dict[str, Any]
) -> Path:
    sizes = {"hidden_size": 120, "intermediate_size": 152}
    return like_llama(model_class, config_class, directory, False, {**sizes, **changes})


def tiny_gemma2(directory: Path, **changes: Any) -> Path:
    """Write a Gemma 2 of 4 layers, every second with a window of 20, and low soft caps."""
    fields = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 10.0, "sliding_window": 20}
    return _gemma(Gemma2ForCausalLM, Gemma2Config, directory, fields | changes)


def tiny_gemma3(directory: Path, **changes: Any) -> Path:
    """Write a Gemma 3 of 4 layers; the third has no window, but scaled positions."""
    return _gemma(Gemma3ForCausalLM, Gemma3TextConfig, directory, GEMMA3_FIELDS | changes)


def tiny_gemma3_with_images(directory: Path) -> Path:
    """Write a model like tiny_gemma3 that also reads images: a nested config, other names."""

    def nested(**fields: Any) -> Gemma3Config:
        image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                 "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
        ids: dict[str, Any] = {"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7}
        return Gemma3Config(text_config=fields, vision_config=image, mm_tokens_per_image=4, **ids)

    return _gemma(Gemma3ForConditionalGeneration, nested, directory, GEMMA3_FIELDS)


GEMMA: dict[str, Callable[[Path], Path]] = {"gemma2": tiny_gemma2, "gemma3_text": tiny_gemma3}


# A model of each family, by model_type. Tests take their parameters from here.
FAMILIES: dict[str, Callable[..., Path]] = {
    "gpt2": tiny_gpt2,
    "gptj": tiny_gptj,
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "olmo2": tiny_olmo2,
    "olmo3": tiny_olmo3,
    "granite": tiny_granite,
    "smollm3": tiny_smollm3,
    "gemma": tiny_gemma,
    "exaone4": tiny_exaone4,
    "seed_oss": tiny_seed_oss,
    "ernie4_5": tiny_ernie4_5,
    "helium": tiny_helium,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    **GEMMA,
    "glm": tiny_glm,
    "glm4": tiny_glm4,
    "gpt_neox": tiny_gpt_neox,
    "opt": tiny_opt,
    "phi3": tiny_phi3,
    "starcoder2": tiny_starcoder2,
}


def let_token_overflow(directory: Path, token: int, value: float = 1e38, part: str = "v") -> Path:
    """Change the finite weights of a saved model so that one token's numbers overflow.

    The token's vector is a channel of its own, which nothing else adds to, and by which the layers
    multiply `value`.

    Args:
        directory: Of a model of 3 or more layers with the names of a Llama.
        token: Its id.
        value: Of the weights; times the root of the number of channels it is infinite.
        part: Where it overflows: "v" in values, "k" in keys.
    """
    channel, file = 5, directory / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, channel], weight[token] = 0, 0
            weight[token, channel] = 1
        elif name == "lm_head.weight":
            weight[token] = 0  # so that it is not sampled
        elif "o_proj" in name or "down_proj" in name or name.endswith("w2.weight"):
            is_expert = "experts.down_proj" in name and "." not in name.split("experts.")[1]
            place = (..., channel) if is_expert or weight.dim() == 1 else channel
            weight[place] = 0
        elif name.endswith(f"{part}_proj.weight"):
            weight[:, channel] = value
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def _gemma(model_class: Any, config_class: Any, directory: Path, changes: dict[str, Any]) -> Path:
    fields = {"num_hidden_layers": 4, "head_dim": 24, "query_pre_attn_scalar": 20, **changes}
    return like_llama(model_class, config_class, directory, True, fields)


def like_llama(
    model_class: Any, config_class: Any, directory: Path, tie: bool, changes: dict[str, Any]
) -> Path:
    """Write a model of 3 layers of 96 channels and context 256, with `changes` of its config."""
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


SPECIAL, PLAIN = "<|beyond|>", "<|above|>"


def add_unserved_tokens(directory: Path) -> Path:
    """Fill the tokenizer of a tiny model up to the model's ids, and add two tokens beyond them."""
    path = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    free = range(VOCAB_SIZE - tokenizer.get_vocab_size())
    tokenizer.add_special_tokens([f"<|unused{number}|>" for number in free])
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.add_tokens([AddedToken(PLAIN, normalized=False)])
    assert tokenizer.token_to_id(SPECIAL) == VOCAB_SIZE
    tokenizer.save(str(path))
    return directory
