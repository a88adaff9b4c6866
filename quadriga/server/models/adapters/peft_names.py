"""The names of the tensors of a PEFT adapter: the path of a module, and what of it changes.

Source: PEFT 0.21, `get_peft_model_state_dict`.
"""

PREFIX = "base_model.model."
DOWN, UP, UP_BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
MAGNITUDE = "lora_magnitude_vector"
EMBEDDING_DOWN, EMBEDDING_UP = "lora_embedding_A", "lora_embedding_B"
TOKENS = "token_adapter.trainable_tokens_delta"
BASE_WEIGHT, BASE_BIAS = "base_layer.weight", "base_layer.bias"
WEIGHT, BIAS = "weight", "bias"
# The longest ones first: a name has the first end that fits.
KINDS = (DOWN, UP, UP_BIAS, MAGNITUDE, EMBEDDING_DOWN, EMBEDDING_UP, TOKENS, BASE_WEIGHT,
         BASE_BIAS, WEIGHT, BIAS)  # fmt: skip
# Parts of names of other methods, which end as those of LoRA do.
_OTHERS = (".lora_", ".lokr_", ".loha_", ".ia3_", ".oft_", ".prompt_")


def split_name(name: str) -> tuple[str, str] | None:
    """Return the path of a tensor's module and its kind, one of KINDS; None if it has none."""
    path = name.removeprefix(PREFIX).replace(".default.", ".")
    if path.endswith(f".{MAGNITUDE}.weight"):
        path = path.removesuffix(".weight")
    kind = next((kind for kind in KINDS if path.endswith(f".{kind}")), None)
    if kind is None:
        return None
    module = path.removesuffix(f".{kind}")
    return None if any(other in f"{module}." for other in _OTHERS) else (module, kind)
