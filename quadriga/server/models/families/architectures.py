"""Find the family that a config.json names, without torch.

The worker builds models from these configurations, and the launcher refuses a model that has none
before a process starts.
"""

from collections.abc import Callable
from typing import Any

from quadriga.errors import ModelError
from quadriga.server.models.families import classifier, config_values, decoder_config, gpt
from quadriga.server.models.families.bert import (
    bert,
    distilbert,
    modernbert,
    mpnet,
    nomic_bert,
    roberta,
)
from quadriga.server.models.families.llama import (
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma3_text,
    glm,
    glm4,
    gpt_oss,
    granite,
    granitemoe,
    helium,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)

INT8_SCALE_BYTES = 4

# By model_type.
CONFIGS: dict[str, Callable[[dict[str, Any]], decoder_config.DecoderConfig]] = {
    "bert": bert,
    "distilbert": distilbert,
    "ernie4_5": ernie4_5,
    "exaone4": exaone4,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3_text,
    "glm": glm,
    "glm4": glm4,
    "gpt2": gpt.gpt2,
    "gpt_neox": gpt.gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gpt.gptj,
    "granite": granite,
    "granitemoe": granitemoe,
    "helium": helium,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "modernbert": modernbert,
    "mpnet": mpnet,
    "nomic_bert": nomic_bert,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "opt": gpt.opt,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "roberta": roberta,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "starcoder2": gpt.starcoder2,
    "xlm-roberta": roberta,
}


def find_architecture(config: dict[str, Any]) -> str:
    """Return the key of CONFIGS for a config.json.

    Raises:
        ModelError: the architecture is not supported.
    """
    names = [config.get("model_type"), *(config.get("architectures") or [])]
    for name in names:
        # A class is called after its model type, such as LlamaForCausalLM or GPT2LMHeadModel.
        kind = str(name).removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
        if kind in CONFIGS:
            return kind
    shown = ", ".join(str(name) for name in names if name) or "nothing"
    raise ModelError(
        f"config.json names {shown} as its architecture; supported: " + ", ".join(sorted(CONFIGS))
    )


def read_architecture(config: dict[str, Any]) -> decoder_config.DecoderConfig:
    """Return what a config.json asks of the worker.

    Raises:
        ModelError: the architecture, or something that the model needs, is not supported.
    """
    config_values.check_shared_types(config)
    architecture = find_architecture(config)
    config_values.check_native_types(config)
    # transformers reads both for every family.
    config_values.require(config, "is_causal", (True, None))
    config_values.require(config, "per_layer_config", (None,))
    classifier.read_head(config)
    return CONFIGS[architecture](config)


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int, int8: bool = False
) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        num_layers: number of layers.
        num_kv_heads: number of key and value heads of a layer.
        head_dim: number of values of a head.
        item_bytes: bytes of a value.
        int8: each head has a scale beside its values.
    """
    scale_bytes = INT8_SCALE_BYTES if int8 else 0
    return 2 * num_layers * num_kv_heads * (head_dim * item_bytes + scale_bytes)
