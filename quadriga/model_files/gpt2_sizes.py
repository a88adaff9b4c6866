"""Architectures of the GPT-2 family, so that --load-format dummy needs no files.

Source of the numbers: Radford et al., "Language Models are Unsupervised Multitask Learners"
(2019), table 2; for distilgpt2, Sanh et al., "DistilBERT" (2019).
"""

from typing import Any, NamedTuple


class Gpt2Size(NamedTuple):
    """One size, with the Hub id of its weights."""

    hub_id: str
    num_layers: int
    hidden_size: int
    num_heads: int


SIZES = {
    "gpt2": Gpt2Size("openai-community/gpt2", 12, 768, 12),
    "gpt2-medium": Gpt2Size("openai-community/gpt2-medium", 24, 1024, 16),
    "gpt2-large": Gpt2Size("openai-community/gpt2-large", 36, 1280, 20),
    "gpt2-xl": Gpt2Size("openai-community/gpt2-xl", 48, 1600, 25),
    "distilgpt2": Gpt2Size("distilbert/distilgpt2", 6, 768, 12),
}
END_OF_TEXT_ID = 50256


def find_size(model: str) -> Gpt2Size | None:
    """Return the size of a model name, with or without its organization; None if it is another."""
    by_hub_id = {size.hub_id: size for size in SIZES.values()}
    return SIZES.get(model) or by_hub_id.get(model)


def hugging_face_config(size: Gpt2Size) -> dict[str, Any]:
    """Return the contents of config.json for a size."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": size.num_layers,
        "n_embd": size.hidden_size,
        "n_head": size.num_heads,
        "n_inner": None,
        "n_positions": 1024,
        "n_ctx": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
    }
