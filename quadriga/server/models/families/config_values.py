"""Read values of a config.json, and refuse those that are not supported.

First the values, then the types of the fields of config.json and generation_config.json.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quadriga.errors import ConfigError, ModelError

# Other names of what a GPT-2, a GPT-J and models with experts have.
GPT_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
EXPERTS_ALIASES = {"num_experts": "num_local_experts"}


class BrokenConfig(ModelError):
    """A config.json contradicts itself, so that nothing can run the model."""


def setting(config: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return a value of config.json, or `default` if it is missing or null.

    Raises:
        ModelError: it is missing and there is no default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config.json has no {key!r}")
    return value


def with_defaults(config: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return config.json with `defaults` for keys that are missing or null."""
    return config | {key: setting(config, key, value) for key, value in defaults.items()}


def with_aliases(config: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return config.json with values of other names, which transformers prefers.

    Args:
        config: config.json.
        names: {the other name: the family's own name}.
    """
    return config | {own: config[other] for other, own in names.items() if other in config}


def require(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raise ModelError if config.json has a value that is not `allowed`.

    A missing key means the first of `allowed`.
    """
    value = config.get(key, allowed[0])
    if value not in allowed:
        shown = ", ".join(repr(choice) for choice in allowed)
        raise ModelError(f"the model's config.json has {key} = {value!r}; supported: {shown}")


def check_tp_size(tp_size: int, **sizes: int) -> None:
    """Raise ConfigError if one of the model's `sizes` is not divisible by `tp_size`."""
    if not any(size % tp_size for size in sizes.values()):
        return
    possible = [n for n in range(1, max(sizes.values()) + 1)
                if not any(size % n for size in sizes.values())]  # fmt: skip
    shown = ", ".join(f"{size} {name.replace('_', ' ')}" for name, size in sizes.items())
    raise ConfigError(
        f"tp is {tp_size}: it must divide the model's {shown}; possible: "
        + ", ".join(map(str, possible))
    )


def check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    """Raise BrokenConfig unless a value of config.json is a multiple of another."""
    if divisor < 1 or value % divisor:
        raise BrokenConfig(
            f"the model's config.json has {name} = {value}, which is no multiple of {divisor_name}"
            f" = {divisor}; take the config.json that the checkpoint was published with"
        )


def attention_biases(config: dict[str, Any], default: bool = False) -> dict[str, bool]:
    """Return qkv_bias and out_bias of a family in which `attention_bias` is both."""
    bias = setting(config, "attention_bias", default)
    return {"qkv_bias": bias, "out_bias": bias}


def head_dim_of(config: dict[str, Any]) -> int:
    """Return `head_dim`, or by default the part of `hidden_size` that each head has.

    Raises:
        ModelError: the heads do not divide `hidden_size`.
    """
    if head_dim := config.get("head_dim"):
        return int(head_dim)
    hidden_size, num_heads = setting(config, "hidden_size"), setting(config, "num_attention_heads")
    check_divides("hidden_size", hidden_size, "num_attention_heads", num_heads)
    return int(hidden_size // num_heads)


# Types are checked once, before anything computes with the values. null is as good as a missing
# field.

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
    (Layers, f"a whole number from 1 to {MAX_LAYERS}", "num_hidden_layers n_layer n_layers"),
    (Size, f"a whole number from 1 to {MAX_SIZE}",
     "hidden_size num_attention_heads num_key_value_heads head_dim n_embd n_head n_inner ffn_dim"
     " word_embed_proj_dim moe_intermediate_size num_local_experts num_experts"
     " num_experts_per_tok decoder_sparse_step rotary_dim intermediate_size dim n_heads"
     " hidden_dim global_attn_every_n_layers"),
    (Count | str, "a whole number or a text", "sliding_window_pattern"),
    (Count, f"a whole number from 0 to {MAX_SIZE}",
     "sliding_window max_window_layers no_rope_layer_interval original_max_position_embeddings"
     " type_vocab_size pad_token_id local_attention"),
    (bool, "true or false",
     "attention_bias mlp_bias tie_word_embeddings use_sliding_window use_bias enable_bias"
     " attention_out_bias norm_topk_prob use_parallel_residual is_decoder add_cross_attention"
     " norm_bias classifier_bias"),
    (Factor, "a number from 0 on",
     "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon norm_eps"),
    (Positive, "a number above 0",
     "rope_theta rope_local_base_freq rotary_emb_base partial_rotary_factor rotary_pct"
     " global_rope_theta local_rope_theta"
     " query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping logits_scaling"),
    (Number, "a number", "attention_multiplier embedding_multiplier residual_multiplier"),
    (str, "a text",
     "hidden_act hidden_activation activation_function activation position_embedding_type"
     " classifier_activation classifier_pooling"),
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
        values: contents of config.json or generation_config.json.
        file: its name.
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
