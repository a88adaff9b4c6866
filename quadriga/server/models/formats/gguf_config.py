"""A GGUF's header, converted once to the files of a Hugging Face directory.

First what single families and the rotary positions have in their metadata, as values of
config.json, then the conversion. gguf_tokenizer.py converts the tokenizer.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quadriga.errors import ModelError
from quadriga.server.cache import cache_directory, publish_directory, scratch_directory
from quadriga.server.models.formats.gguf_reader import (
    GGUFHeader,
    TensorIndex,
    first_file,
    gguf_files,
    read_architecture_name,
    read_float32,
    read_whole_header,
)
from quadriga.server.models.formats.gguf_tokenizer import end_token_ids, write_tokenizer


def _decimal(value: float) -> float:
    """Return the decimal number of a float32: GGUF stores 1e-05 as 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _shared_values(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all architectures but GPT-2 name alike. name: of the class, such as Llama."""
    heads = values["attention.head_count"]
    return {
        "model_type": name.lower(),
        "architectures": [f"{name}ForCausalLM"],
        "num_hidden_layers": values["block_count"],
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": values.get("attention.head_count_kv", heads),
        "rope_theta": _decimal(values.get("rope.freq_base", 10000.0)),
        "max_position_embeddings": values["context_length"],
    }


def _head_dim(values: Mapping[str, Any]) -> int:
    """Return the channels of a head; those of `hidden_size` where the header has none."""
    width = values["embedding_length"] // values["attention.head_count"]
    return int(values.get("attention.key_length") or width)


# A GGUF of a Gemma lacks some constants, for which llama.cpp's are taken (src/models/gemma2.cpp,
# gemma3.cpp).

# Layers of the models of 27 billion weights, whose heads are smaller than hidden_size / heads.
GEMMA2_LAYERS_27B = {"Gemma2": 46, "Gemma3": 62}


def gemma2_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    """Return the config of a Gemma 2: a window in every second layer, bounded scores.

    Raises:
        ModelError: layers with and without a window have different rotary positions.
    """
    theta = values.get("rope.freq_base", 10000.0)
    if (local_theta := values.get("rope.freq_base_swa", theta)) != theta:
        raise ModelError(
            f"gemma2.rope.freq_base_swa = {local_theta} is not supported; supported: {theta}, which"
            " is gemma2.rope.freq_base"
        )
    return _shared_by_gemmas("Gemma2", values) | {
        "sliding_window": values.get("attention.sliding_window", 4096),
        "layer_types": _gemma3_layer_types(values, 2),
        # 0 means none.
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0) or None,
    }


def gemma3_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    """Return the config of a Gemma 3's text model: a window in five layers of six, or in none."""
    window = values.get("attention.sliding_window", 0)
    return _shared_by_gemmas("Gemma3", values) | {
        "sliding_window": window,
        "layer_types": _gemma3_layer_types(values, 6 if window else 1),
        "final_logit_softcapping": values.get("final_logit_softcapping") or None,
        "rope_theta": values.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
    }


def _gemma3_layer_types(values: Mapping[str, Any], period: int) -> list[str]:
    """Return which layers have a window: those of a list, or all but every `period`-th one."""
    num_layers = values["block_count"]
    pattern = values.get("attention.sliding_window_pattern", period)
    if period == 1:  # there is no window
        pattern = 1
    if not isinstance(pattern, list):
        pattern = [not pattern or bool((layer + 1) % pattern) for layer in range(num_layers)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _shared_by_gemmas(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    shared, head_dim = _shared_values(name, values), _head_dim(values)
    is_27b = values["block_count"] == GEMMA2_LAYERS_27B[name]
    width = shared["hidden_size"] // shared["num_attention_heads"] if is_27b else head_dim
    return shared | {
        "head_dim": head_dim,
        "query_pre_attn_scalar": width,
        "rms_norm_eps": _decimal(values["attention.layer_norm_rms_epsilon"]),
        "hidden_activation": "gelu_pytorch_tanh",
    }


# What the GGUF of a variant of Llama has beside Llama's metadata. Source: llama.cpp's converter
# (conversion/gemma.py, granite.py and olmo.py).


def gemma_values(_: Mapping[str, Any]) -> dict[str, Any]:
    """Return the activation of a Gemma 1, which its GGUF does not name."""
    return {"hidden_act": "gelu_pytorch_tanh"}


def granite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the factors of a Granite. Raise KeyError without the one of the logits.

    Raises:
        ModelError: nothing is rotated.
    """
    if not values.get("rope.scaling.finetuned", True):
        raise ModelError(
            "granite.rope.scaling.finetuned = False, a model that rotates nothing, is not"
            " supported in a GGUF; supported: True"
        )
    factors = {
        "attention_multiplier": values.get("attention.scale") or _head_dim(values) ** -0.5,
        "embedding_multiplier": values.get("embedding_scale") or 1.0,
        "residual_multiplier": values.get("residual_scale") or 1.0,
        "logits_scaling": values["logit_scale"],
    }
    return {key: _decimal(value) for key, value in factors.items()}


def olmo2_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nothing for an OLMo 2.

    Raises:
        ModelError: the model is an Olmo 3, whose GGUF has the same architecture.
    """
    if values.get("attention.sliding_window", 0):
        raise ModelError(
            "the GGUF is of an Olmo 3 (olmo2.attention.sliding_window ="
            f" {values['attention.sliding_window']}), which is not supported in a GGUF; use the"
            " model's Hugging Face directory"
        )
    return {}


def phi3_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    """Return the config of a Phi-3, 3.5 or 4; a window of 0 tokens means none."""
    head_dim = _head_dim(values)
    return _shared_values("Phi3", values) | {
        "head_dim": head_dim,
        "partial_rotary_factor": values.get("rope.dimension_count", head_dim) / head_dim,
        "rms_norm_eps": _decimal(values["attention.layer_norm_rms_epsilon"]),
        "original_max_position_embeddings": (
            values.get("rope.scaling.original_context_length") or values["context_length"]
        ),
        "sliding_window": values.get("attention.sliding_window") or None,
        "hidden_act": "silu",
    }


STARCODER2_WINDOW = 4096  # tokens; the same in all published sizes, and not in a GGUF


def starcoder2_config(values: Mapping[str, Any], tensors: TensorIndex) -> dict[str, Any]:
    """Return the config of a StarCoder2."""
    return _shared_values("Starcoder2", values) | {
        "norm_epsilon": _decimal(values["attention.layer_norm_epsilon"]),
        "sliding_window": values.get("attention.sliding_window", STARCODER2_WINDOW),
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": "blk.0.attn_q.bias" in tensors,
    }


# Rotary positions in a GGUF as Hugging Face's `rope_scaling`.
#
# Source: the GGUF specification (ggml, docs/gguf.md), and llama.cpp's use of keys and tensors.

# Tensors of constants [head_dim / 2] by which frequencies are divided; they are not weights.
ROPE_FREQS = "rope_freqs.weight"
LONG_FACTORS = "rope_factors_long.weight"
SHORT_FACTORS = "rope_factors_short.weight"
ROPE_TENSORS = frozenset((ROPE_FREQS, LONG_FACTORS, SHORT_FACTORS))

_ROPE_TYPES = ("none", "linear", "yarn", "longrope")


def rope_scaling(values: Mapping[str, Any], divisors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the part of config.json that describes scaled positions; empty if there are none.

    Args:
        values: metadata without the architecture's prefix.
        divisors: the values of those of ROPE_TENSORS that the file has.

    Raises:
        ModelError: the scaling is unknown or incomplete.
    """
    # Without a type, a factor is linear.
    kind = values.get("rope.scaling.type", "linear")
    if kind not in _ROPE_TYPES:
        raise ModelError(
            f"rope.scaling.type = {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
        )
    for name, neutral in (
        ("yarn_log_multiplier", 0),
        ("yarn_ext_factor", 1),
        ("yarn_attn_factor", 1),
    ):
        if values.get(f"rope.scaling.{name}", neutral) != neutral:
            raise ModelError(f"rope.scaling.{name} is not supported")
    factor = 1.0 if kind == "none" else _rope_factor(values)
    attention_factor = float(values.get("rope.scaling.attn_factor") or 1.0)
    if kind == "yarn":
        parameters = _yarn(values, divisors, factor, attention_factor)
    elif kind == "longrope" or LONG_FACTORS in divisors or SHORT_FACTORS in divisors:
        parameters = _longrope(divisors, factor, attention_factor)
    elif ROPE_FREQS in divisors or attention_factor != 1.0:
        # The same divisors for every context.
        divided = divisors.get(ROPE_FREQS) or [1.0] * (_num_rotated(values) // 2)
        parameters = _longrope(
            {SHORT_FACTORS: divided, LONG_FACTORS: divided}, factor, attention_factor
        )
    elif factor != 1.0:
        parameters = {"rope_type": "linear", "factor": factor}
    else:
        return {}
    context = values["context_length"]
    original = values.get("rope.scaling.original_context_length") or context
    return {"rope_scaling": {"original_max_position_embeddings": original, **parameters}}


def _rope_factor(values: Mapping[str, Any]) -> float:
    """Return the number by which positions are divided, of which an older key is the other name."""
    key = "rope.scaling.factor"
    if key not in values:
        key = "rope.scale_linear"
    factor = _decimal(values.get(key) or 1.0)
    if not factor > 0 or not math.isfinite(factor):
        raise ModelError(f"{key} = {factor} is not supported; supported: numbers above 0")
    return factor


def _num_rotated(values: Mapping[str, Any]) -> int:
    head_dim = values["embedding_length"] // values["attention.head_count"]
    return int(values.get("rope.dimension_count") or values.get("attention.key_length") or head_dim)


def _yarn(
    values: Mapping[str, Any],
    divisors: Mapping[str, list[float]],
    factor: float,
    attention_factor: float,
) -> dict[str, Any]:
    if divisors:
        raise ModelError(
            f"rope.scaling.type = 'yarn' is not supported together with {', '.join(divisors)}"
        )
    parameters: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        parameters[name] = values.get(f"rope.scaling.yarn_{name}")
    if attention_factor != 1.0:
        # It multiplies YaRN's own factor.
        own = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        parameters["attention_factor"] = own * attention_factor
    return parameters


def _longrope(
    divisors: Mapping[str, list[float]], factor: float, attention_factor: float
) -> dict[str, Any]:
    """Return divisors for short and long contexts; `factor` divides all frequencies as well."""
    for name in (LONG_FACTORS, SHORT_FACTORS):
        if name not in divisors:
            raise ModelError(
                "rope.scaling.type is 'longrope', or the file has some of its factors, but there"
                f" is no {name}"
            )
    if ROPE_FREQS in divisors:
        raise ModelError(f"{ROPE_FREQS} is not supported together with {LONG_FACTORS}")
    return {
        "rope_type": "longrope",
        "short_factor": [factor * divisor for divisor in divisors[SHORT_FACTORS]],
        "long_factor": [factor * divisor for divisor in divisors[LONG_FACTORS]],
        "attention_factor": attention_factor,
    }


# The conversion can take seconds, since the header holds the whole vocabulary; reading the files
# does not. Source: the GGUF specification (ggml, docs/gguf.md).

# Part of the cache key: increase it when the written files change.
EXPORT_VERSION = 6
# Architectures in which a part of each head may be rotated.
PARTLY_ROTATED = ("phi3",)
# Keys of llama.cpp that change what a model computes -> their values that change nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "deepstack_mapping": (-1,),
    "embedding_scale": (0, 1),
    "expert_shared_feed_forward_length": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (0,),
    "rope.scaling.alpha": (0,),
}
# Tensors with a row for each id. The model has the ids that all of them have.
VOCABULARY_TENSORS = ("token_embd.weight", "output.weight")


def header_files(path: Path) -> Path:
    """Return the directory of a GGUF's converted header, and make it if it does not exist.

    Of a split GGUF, `path` is any part.

    It holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json and
    tensors.json, the tensor index with the GGUF's names.

    Raises:
        ModelError: the file cannot be used.
    """
    path = first_file(path)
    directory = cache_directory() / "gguf-headers" / _key(path)
    if not directory.is_dir():
        with scratch_directory() as scratch:
            header = scratch / "header"
            header.mkdir()
            _export(path, header)
            publish_directory(header, directory)
    return directory


def _key(path: Path) -> str:
    states = [file.stat() for file in gguf_files(path)]  # links have the names of the parts
    path = path.resolve()
    identity = " ".join(
        [f"{EXPORT_VERSION} {path}", *(f"{state.st_size} {state.st_mtime_ns}" for state in states)]
    )
    return f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _export(path: Path, directory: Path) -> None:
    _check_architecture(path)
    header = read_whole_header(path)
    metadata, tensors = header.metadata, header.tensors
    try:
        config = make_config(metadata, tensors, rope_divisors_of(path, header))
        write_tokenizer(metadata, directory)
    except KeyError as error:
        raise ModelError(f"{path} lacks {error}: it is not a complete GGUF model") from None
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    generation = {"eos_token_id": end_token_ids(metadata), **_sampling(metadata)}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tensors.json", tensors),
    ):
        (directory / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recommended sampling parameters, by their names in generation_config.json."""
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    given = {name: metadata.get(f"general.sampling.{key}") for key, name in names.items()}
    return {
        name: _decimal(value) if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }


def _check_architecture(path: Path) -> None:
    """Raise ModelError for an unsupported architecture, before the vocabulary is read."""
    architecture = read_architecture_name(path)
    if architecture is not None and architecture not in _CONFIGS:
        raise ModelError(f"{path}: {_unsupported(architecture)}")


def _unsupported(architecture: str) -> str:
    return (
        f"general.architecture is {architecture!r}, which is not supported in a GGUF (supported:"
        f" {', '.join(_CONFIGS)}); take a model of one of these"
    )


def rope_divisors_of(path: Path, header: GGUFHeader) -> dict[str, list[float]]:
    """Return the values of the tensors that scale rotary positions."""
    files = gguf_files(path)
    return {
        name: read_float32(files[entry.get("part", 0)], entry)
        for name, entry in header.tensors.items()
        if name in ROPE_TENSORS
    }


def make_config(
    metadata: Mapping[str, Any], tensors: TensorIndex, rope_divisors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Return config.json with Hugging Face's keys.

    Raises:
        ModelError: the forward pass of this model would be wrong.
    """
    architecture = metadata["general.architecture"]
    if architecture not in _CONFIGS:
        raise ModelError(_unsupported(architecture))
    values = _KeysRead(
        {
            name.removeprefix(f"{architecture}."): value
            for name, value in metadata.items()
            if name.startswith(f"{architecture}.")
        }
    )
    if values.get("expert_count", 0) > 0:
        raise ModelError("mixture-of-experts models are not supported")
    config = _CONFIGS[architecture](values, tensors)
    _check_head_sizes(architecture, values)
    config |= rope_scaling(values, rope_divisors)
    _refuse_ignored(architecture, values)
    rows = (tensors[name]["shape"][0] for name in VOCABULARY_TENSORS if name in tensors)
    config["vocab_size"] = min(tensors["token_embd.weight"]["shape"][0], *rows)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    for role in ("bos", "eos"):
        if (token_id := metadata.get(f"tokenizer.ggml.{role}_token_id")) is not None:
            config[f"{role}_token_id"] = token_id
    return config


class _KeysRead(dict[str, Any]):
    """An architecture's metadata without its prefix, which remembers the keys that were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` without one."""
        self.read.add(key)
        return super().get(key, default)


def _check_head_sizes(architecture: str, values: _KeysRead) -> None:
    """Raise ModelError if values, or heads of layers with a window, have another size."""
    if "attention.head_count" not in values:
        return
    head_dim = _head_dim(values)
    rotated = values.get("rope.dimension_count") or head_dim
    for name, allowed in (
        ("attention.value_length", head_dim),
        ("attention.key_length_swa", head_dim),
        ("attention.value_length_swa", head_dim),
        ("rope.dimension_count", rotated if architecture in PARTLY_ROTATED else head_dim),
        ("rope.dimension_count_swa", rotated),
    ):
        if (value := values.get(name) or allowed) != allowed:
            raise ModelError(
                f"{architecture}.{name} = {value} is not supported; supported: {allowed}"
            )


def _refuse_ignored(architecture: str, values: _KeysRead) -> None:
    """Raise ModelError for a key that would change the logits, and that nothing has read."""
    for name, neutral in NEUTRAL_VALUES.items():
        value = values.get(name) if name not in values.read else None
        for item in value if isinstance(value, list) else [value]:
            if item is not None and item not in neutral:
                shown = ", ".join(str(allowed) for allowed in neutral)
                raise ModelError(
                    f"{architecture}.{name} = {item} is not supported for this architecture;"
                    f" supported: {shown}"
                )


def _llama_config(values: Mapping[str, Any], tensors: TensorIndex) -> dict[str, Any]:
    """Return the config of a Llama; of a Mistral, if there is a window."""
    window = values.get("attention.sliding_window", 0)
    if not window:
        return _like_llama("Llama", values, tensors)
    return _like_llama("Mistral", values, tensors) | {"sliding_window": window}


def _like_llama(name: str, values: Mapping[str, Any], tensors: TensorIndex) -> dict[str, Any]:
    """Return the config of Llama or of an architecture with the same keys."""
    return _shared_values(name, values) | {
        "head_dim": _head_dim(values),
        "rms_norm_eps": _decimal(values["attention.layer_norm_rms_epsilon"]),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


def _variant(
    name: str,
    own_values: Callable[[Mapping[str, Any]], dict[str, Any]],
    values: Mapping[str, Any],
    tensors: TensorIndex,
) -> dict[str, Any]:
    """Return the config of an architecture with Llama's keys and some of its own."""
    return _like_llama(name, values, tensors) | own_values(values)


def _gpt2_config(values: Mapping[str, Any], _: TensorIndex) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": values["block_count"],
        "n_embd": values["embedding_length"],
        "n_inner": values["feed_forward_length"],
        "n_head": values["attention.head_count"],
        "n_positions": values["context_length"],
        "n_ctx": values["context_length"],
        "layer_norm_epsilon": _decimal(values["attention.layer_norm_epsilon"]),
        "activation_function": "gelu_new",
    }


_CONFIGS: dict[str, Callable[[Mapping[str, Any], TensorIndex], dict[str, Any]]] = {
    "llama": _llama_config,
    "qwen2": partial(_like_llama, "Qwen2"),
    "qwen3": partial(_like_llama, "Qwen3"),
    "gpt2": _gpt2_config,
    "gemma2": gemma2_config,
    "gemma3": gemma3_config,
    "gemma": partial(_variant, "Gemma", gemma_values),
    "granite": partial(_variant, "Granite", granite_values),
    "olmo2": partial(_variant, "Olmo2", olmo2_values),
    "smollm3": partial(_like_llama, "SmolLM3"),
    "phi3": phi3_config,
    "starcoder2": starcoder2_config,
}
