"""The types of the fields of config.json and generation_config.json that are read.

They are checked once, before anything computes with them. null is as good as a missing field.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quadriga.model_files.config.config_values import BrokenConfig

MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000

Size = Annotated[int, Meta(ge=1, le=MAX_SIZE)]
Layers = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Count = Annotated[int, Meta(ge=0, le=MAX_SIZE)]
TokenId = Annotated[int, Meta(ge=-MAX_SIZE, le=MAX_SIZE)]
Number = Annotated[float, Meta(gt=-1e38, lt=1e38)]
Positive = Annotated[float, Meta(gt=0, lt=1e38)]
Factor = Annotated[float, Meta(ge=0, lt=1e38)]

# Types, the words that an error has for them, and the names of fields.
_Kind = tuple[Any, str, str]

_SHARED: tuple[_Kind, ...] = (
    (Size, f"a whole number from 1 to {MAX_SIZE}",
     "vocab_size max_position_embeddings n_positions n_ctx"),
    (TokenId | list[TokenId], "a token id, or a list of them", "eos_token_id bos_token_id"),
    (str, "a text", "model_type"),
    (list[str], "a list of texts", "architectures layer_types layers_block_type"),
    (dict[str, Any], "a map", "auto_map quantization_config compression_config text_config"),
)  # fmt: skip
_NATIVE: tuple[_Kind, ...] = (
    (Layers, f"a whole number from 1 to {MAX_LAYERS}", "num_hidden_layers n_layer"),
    (Size, f"a whole number from 1 to {MAX_SIZE}",
     "hidden_size num_attention_heads num_key_value_heads head_dim n_embd n_head n_inner ffn_dim"
     " word_embed_proj_dim moe_intermediate_size num_local_experts num_experts"
     " num_experts_per_tok decoder_sparse_step rotary_dim intermediate_size"),
    (Count | str, "a whole number or a text", "sliding_window_pattern"),
    (Count, f"a whole number from 0 to {MAX_SIZE}",
     "sliding_window max_window_layers no_rope_layer_interval original_max_position_embeddings"),
    (bool, "true or false",
     "attention_bias mlp_bias tie_word_embeddings use_sliding_window use_bias enable_bias"
     " attention_out_bias norm_topk_prob use_parallel_residual"),
    (Factor, "a number from 0 on", "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon"),
    (Positive, "a number above 0",
     "rope_theta rope_local_base_freq rotary_emb_base partial_rotary_factor rotary_pct"
     " query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping logits_scaling"),
    (Number, "a number", "attention_multiplier embedding_multiplier residual_multiplier"),
    (str, "a text", "hidden_act hidden_activation activation_function"),
    (list[int], "a list of whole numbers", "no_rope_layers mlp_only_layers"),
    (dict[str, Any], "a map", "rope_scaling rope_parameters"),
)  # fmt: skip
_ROPE: tuple[_Kind, ...] = (
    (str, "a text", "rope_type type"),
    (Positive, "a number above 0",
     "rope_theta factor attention_factor beta_fast beta_slow low_freq_factor high_freq_factor"
     " partial_rotary_factor original_max_position_embeddings"),
    (Number, "a number", "mscale mscale_all_dim"),
    (list[Positive], "a list of numbers above 0", "short_factor long_factor"),
    (dict[str, Any], "a map", "full_attention sliding_attention"),
    (bool, "true or false", "truncate"),
)  # fmt: skip
_ROPE_MAPS = ("rope_scaling", "rope_parameters")


def check_shared_types(values: Mapping[str, Any], file: str = "config.json") -> None:
    """Check the fields that are read of every model. Raise BrokenConfig with the field's name.

    Args:
        values: Contents of config.json or generation_config.json.
        file: Its name.
    """
    _check(values, _SHARED, file, "")


def check_native_types(config: Mapping[str, Any]) -> None:
    """Check the fields of which native models are built. Raise BrokenConfig with the name."""
    _check(config, _NATIVE, "config.json", "")
    for name in _ROPE_MAPS:
        rope = config.get(name) or {}
        _check(rope, _ROPE, "config.json", f"{name}.")
        for kind in ("full_attention", "sliding_attention"):
            _check(rope.get(kind) or {}, _ROPE, "config.json", f"{name}.{kind}.")


def _check(values: Mapping[str, Any], kinds: tuple[_Kind, ...], file: str, where: str) -> None:
    for kind, words, names in kinds:
        for name in names.split():
            if values.get(name) is None:
                continue
            try:
                msgspec.convert(values[name], kind)
            except msgspec.ValidationError:
                shown = f"{values[name]!r:.80}"
                raise BrokenConfig(
                    f"the model's {file} has {where}{name} = {shown}; it should be {words}"
                ) from None
