"""Find the family that a config.json names, without torch.

The worker builds models from these configurations, and the launcher refuses a model that has none
before a process starts.
"""

from collections.abc import Callable
from typing import Any

from quadriga.errors import ModelError
from quadriga.model_files.config.config_values import require
from quadriga.model_files.config.decoder_config import DecoderConfig
from quadriga.model_files.config.field_types import check_native_types, check_shared_types
from quadriga.model_files.families.experts.gpt_oss import gpt_oss
from quadriga.model_files.families.experts.granite import granitemoe
from quadriga.model_files.families.experts.mixtral import mixtral
from quadriga.model_files.families.experts.qwen import qwen3_moe
from quadriga.model_files.families.gemma import gemma2, gemma3
from quadriga.model_files.families.glm import glm, glm4
from quadriga.model_files.families.gpt2 import gpt2
from quadriga.model_files.families.gpt_neox import gpt_neox
from quadriga.model_files.families.gptj import gptj
from quadriga.model_files.families.llama import llama, mistral
from quadriga.model_files.families.llama_variants.ernie4_5 import ernie4_5
from quadriga.model_files.families.llama_variants.exaone4 import exaone4
from quadriga.model_files.families.llama_variants.gemma1 import gemma
from quadriga.model_files.families.llama_variants.granite import granite
from quadriga.model_files.families.llama_variants.helium import helium
from quadriga.model_files.families.llama_variants.olmo import olmo2, olmo3
from quadriga.model_files.families.llama_variants.seed_oss import seed_oss
from quadriga.model_files.families.llama_variants.smollm3 import smollm3
from quadriga.model_files.families.opt import opt
from quadriga.model_files.families.phi3 import phi3
from quadriga.model_files.families.qwen import qwen2, qwen3
from quadriga.model_files.families.starcoder2 import starcoder2

INT8_SCALE_BYTES = 4

# By model_type.
CONFIGS: dict[str, Callable[[dict[str, Any]], DecoderConfig]] = {
    "ernie4_5": ernie4_5,
    "exaone4": exaone4,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "glm": glm,
    "glm4": glm4,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "gptj": gptj,
    "granite": granite,
    "granitemoe": granitemoe,
    "helium": helium,
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "opt": opt,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
}


def find_architecture(config: dict[str, Any]) -> str:
    """Return the key of CONFIGS for a config.json.

    Raises:
        ModelError: The architecture is not supported.
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


def read_architecture(config: dict[str, Any]) -> DecoderConfig:
    """Return what a config.json asks of the worker.

    Raises:
        ModelError: The architecture, or something that the model needs, is not supported.
    """
    check_shared_types(config)
    architecture = find_architecture(config)
    check_native_types(config)
    # transformers reads both for every family.
    require(config, "is_causal", (True, None))
    require(config, "per_layer_config", (None,))
    return CONFIGS[architecture](config)


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int, int8: bool = False
) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        num_layers: Number of layers.
        num_kv_heads: Number of key and value heads of a layer.
        head_dim: Number of values of a head.
        item_bytes: Bytes of a value.
        int8: Each head has a scale beside its values.
    """
    scale_bytes = INT8_SCALE_BYTES if int8 else 0
    return 2 * num_layers * num_kv_heads * (head_dim * item_bytes + scale_bytes)
